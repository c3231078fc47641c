"""URLs of registries, what the environment adds to them, and where artifacts are read from."""

from __future__ import annotations

from pathlib import Path

import pytest

from conch.core.errors import InvalidArgumentError
from conch_mlflow.locations import MlflowEnvironment, MlflowLocation, parse_location
from conch_mlflow.registry_store import UnreadableError, root_of

ID = "m-0123456789abcdef0123456789abcdef"


@pytest.mark.parametrize(
    ("text", "location"),
    [
        ("mlflow://host", MlflowLocation("mlflow://host", True, "host")),
        ("mlflow+http://h:5000/", MlflowLocation("mlflow+http://h:5000", False, "h", 5000)),
        ("mlflow://[::1]:1/a/b/", MlflowLocation("mlflow://[::1]:1/a/b", True, "::1", 1, "/a/b")),
        (
            "mlflow://h?alias=a,b&alias=a",
            MlflowLocation("mlflow://h?alias=a,b&alias=a", True, "h", aliases=("a", "b")),
        ),
        ("mlflow://h?stable=a", MlflowLocation("mlflow://h?stable=a", True, "h", stable="a")),
    ],
)
def test_locations(text: str, location: MlflowLocation) -> None:
    assert parse_location(text) == location
    assert "?" not in location.models


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("mlflow://", "no URL of an MLflow server"),
        ("mlflow:///models", "no URL of an MLflow server"),
        ("mlflow://h:0", "0 is not a port"),
        ("mlflow://h:99999", "99999 is not a port"),
        ("mlflow://me:secret@h", "credentials come from MLFLOW_TRACKING_TOKEN"),
        ("mlflow://h?stage=x", "'stage' is not known, only 'alias' and 'stable' are"),
        ("mlflow://h?stable=", "'' is no alias"),
        ("mlflow://h?stable=&stable=b", "'stable' is given twice"),
        ("mlflow://h?stable=a&alias=b", "'stable' names 'a', which 'alias' does not"),
        ("mlflow://h?alias=", "'' is no alias"),
        ("mlflow://h?alias=a b", "'a b' is no alias"),
        ("mlflow://h/a b", "no URL of an MLflow server"),
        ("mlflow://h\r\nX: y", "no URL of an MLflow server"),
    ],
)
def test_malformed_locations_say_what_to_write(text: str, reason: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        parse_location(text)
    assert reason in caught.value.message and "write mlflow://host:port/path" in caught.value.message
    assert "secret" not in caught.value.message


def test_credentials_of_mlflows_client(tmp_path: Path) -> None:
    location = parse_location("mlflow://h")

    def read(**variables: str) -> str:
        named = {f"MLFLOW_TRACKING_{name}": value for name, value in variables.items()}
        found = MlflowEnvironment(named).read(location)
        assert all(secret not in repr(found) for secret in found.secrets() if secret)
        return found.authorization

    assert read() == ""
    assert read(TOKEN="abc") == "Bearer abc"
    assert read(USERNAME="me", PASSWORD="ü", TOKEN="abc") == "Basic bWU6w7w="
    with pytest.raises(InvalidArgumentError, match="MLFLOW_TRACKING_TOKEN: it must be printable"):
        read(TOKEN="a\nb")
    missing = {"MLFLOW_TRACKING_SERVER_CERT_PATH": str(tmp_path / "none.pem")}
    with pytest.raises(InvalidArgumentError, match=r"MLFLOW_TRACKING_SERVER_CERT_PATH .*none\.pem"):
        MlflowEnvironment(missing).read(location).tls()


@pytest.mark.parametrize(
    ("uri", "source", "root"),
    [
        (f"mlflow-artifacts:/1/models/{ID}/artifacts", f"models:/{ID}", f"artifacts:1/models/{ID}/artifacts"),
        ("mlflow-artifacts://host:5000/1/run/artifacts/m", "runs:/run/m", "artifacts:1/run/artifacts/m"),
        ("s3://bucket/1/models/x/", f"models:/{ID}", "s3://bucket/1/models/x"),
        ("/srv/mlruns/1", f"models:/{ID}", f"version:a%2Fb/3/{ID}"),
        ("dbfs:/x", f"models:/{ID}", f"version:a%2Fb/3/{ID}"),
    ],
)
def test_roots_of_artifacts(uri: str, source: str, root: str) -> None:
    assert root_of(uri, "a/b", 3, source) == root


@pytest.mark.parametrize(
    ("uri", "source"),
    [
        ("mlflow-artifacts:/1/../../etc", f"models:/{ID}"),
        ("mlflow-artifacts:/", f"models:/{ID}"),
        ("file:///srv/x", "runs:/run/m"),
        ("file:///srv/x", "models:/m-../../x"),
        ("s3://http://elsewhere.example:9000/bucket/x", f"models:/{ID}"),
        ("s3://elsewhere.example:9000/bucket/x", f"models:/{ID}"),
        ("s3://https://elsewhere.example/bucket/x", f"models:/{ID}"),
        ("s3://bucket/../x", f"models:/{ID}"),
        ("", ""),
    ],
)
def test_artifacts_that_can_not_be_read(uri: str, source: str) -> None:
    with pytest.raises(UnreadableError, match="its artifact is at"):
        root_of(uri, "m", 1, source)
