"""`conch serve` with a repository in an object store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import tritonclient.grpc as triton
from tests.support.emulators import S3Emulator, put_tree, s3_emulator
from tests.support.faulty_proxy import Fault, faulty_proxy
from tests.support.servers import client_of, eventually, probe_inputs, started, write_probe

SECRET = "hush-hush"


def served(client: triton.InferenceServerClient, model: str = "probe") -> str:
    """The version of a model that answers."""
    version: str = client.infer(model, probe_inputs(1.0)).get_response().model_version
    return version


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Emulator]:
    with s3_emulator() as running:
        yield running


@pytest.fixture
def environment(s3: S3Emulator) -> dict[str, str]:
    return s3.environment() | {"AWS_SECRET_ACCESS_KEY": SECRET}


def test_a_model_is_served_and_reloaded(s3: S3Emulator, environment: dict[str, str], tmp_path: Path) -> None:
    bucket = s3.bucket("served")
    put_tree(bucket, write_probe(tmp_path / "source"), "models/probe/")
    local = tmp_path / "local"
    write_probe(local, "beside")
    with faulty_proxy(s3.port) as proxy:
        location = s3.location("served", "models", proxy.port)
        flags = [
            f"--model-repository={location}",
            f"--model-repository={local}",
            "--model-control-mode=explicit",
            "--load-model=*",
            f"--model-cache-directory={tmp_path / 'cache'}",
            "--storage-timeout-secs=20",
            "--log-verbose=1",
            "--grpc-port=0",
        ]
        with started(*flags, environment=environment) as server:
            server.wait_ready()
            with client_of(server) as client:
                assert served(client) == "1"
                assert served(client, "beside") == "1"
                proxy.seen.clear()
                client.load_model("probe")
                assert not [seen for seen in proxy.seen if seen.range]  # nothing has changed

                put_tree(bucket, write_probe(tmp_path / "next", versions=[2]), "models/probe/")
                client.load_model("probe")
                assert served(client) == "2"
                fetched = [seen.path for seen in proxy.seen if seen.range]
                assert not [path for path in fetched if "/probe/1/" in path]

                # While the store hangs, models are served, and loading says what is wrong.
                proxy.fail(Fault.HANG)
                assert served(client) == "2"
                with pytest.raises(Exception, match="probe"):
                    client.load_model("probe")
                assert served(client) == "2"
                proxy.heal()
                client.load_model("probe")
                index = client.get_model_repository_index(as_json=True)["models"]
                assert {("probe", "2"), ("beside", "1")} <= {(m["name"], m.get("version")) for m in index}
            assert server.stop() == 0
            assert "Traceback" not in server.errors
            assert SECRET not in server.errors
            assert "fetching" in server.errors
    assert list((tmp_path / "cache" / "owners").iterdir()) == []
    assert list((tmp_path / "cache" / "blobs").iterdir())


def test_rollout_toml_is_followed(s3: S3Emulator, environment: dict[str, str], tmp_path: Path) -> None:
    bucket = s3.bucket("rollout")
    put_tree(bucket, write_probe(tmp_path / "source"), "probe/")
    bucket.put("probe/rollout.toml", b'[rollout]\nsteps = ["shadow 100% 1h"]')
    flags = [
        f"--model-repository={s3.location('rollout')}",
        f"--model-cache-directory={tmp_path / 'cache'}",
        "--model-control-mode=poll",
        "--repository-poll-secs=0.2",
        "--grpc-port=0",
    ]
    with started(*flags, environment=environment) as server:
        server.wait_ready()
        with client_of(server) as client:
            put_tree(bucket, write_probe(tmp_path / "next", versions=[2]), "probe/")
            eventually(lambda: client.is_model_ready("probe", "2"), "the candidate is loaded")
            assert served(client) == "1"
            bucket.put("probe/rollout.toml", b"[rollout]\nsplit = { 1 = 0, 2 = 100 }")
            eventually(lambda: served(client) == "2", "the changed file is followed")
        assert server.stop() == 0


def test_a_start_with_a_filled_cache_fetches_nothing(
    s3: S3Emulator, environment: dict[str, str], tmp_path: Path
) -> None:
    bucket = s3.bucket("again")
    put_tree(bucket, write_probe(tmp_path / "source"), "probe/")
    with faulty_proxy(s3.port) as proxy:
        flags = [
            f"--model-repository={s3.location('again', '', proxy.port)}",
            f"--model-cache-directory={tmp_path / 'cache'}",
            "--grpc-port=0",
        ]
        for _ in range(2):
            with started(*flags, environment=environment) as server:
                server.wait_ready()
                first = [seen for seen in proxy.seen if seen.range]
                proxy.seen.clear()
                # Killed, so that it leaves what it had in use.
                server.kill()
        assert first == []


@pytest.mark.parametrize(
    ("location", "timeout_s", "text"),
    [
        ("{s3}nowhere/models", 120, "repository path is not a valid directory"),
        ("s3://host:99999/bucket", 120, "99999 is not a port"),
        (
            "hdfs://host/models",
            120,
            "scheme 'hdfs' is not known; known are s3://, mlflow+http://, mlflow://, gs://, as://",
        ),
        ("s3://127.0.0.1:1/bucket/models", 1, "model repository 's3://127.0.0.1:1/bucket/models': "),
    ],
)
def test_a_repository_that_can_not_be_read_ends_the_start(
    s3: S3Emulator, environment: dict[str, str], tmp_path: Path, location: str, timeout_s: int, text: str
) -> None:
    location = location.format(s3=f"s3://127.0.0.1:{s3.port}/")
    flags = [
        f"--model-repository={location}",
        f"--model-cache-directory={tmp_path / 'cache'}",
        f"--storage-timeout-secs={timeout_s}",
        "--grpc-port=0",
    ]
    with started(*flags, environment=environment) as server:
        assert server.wait() == 1
        assert text in server.errors
        assert "Traceback" not in server.errors


def test_a_budget_that_is_too_small_is_said(
    s3: S3Emulator, environment: dict[str, str], tmp_path: Path
) -> None:
    put_tree(s3.bucket("small"), write_probe(tmp_path / "source"), "probe/")
    flags = [
        f"--model-repository={s3.location('small')}",
        f"--model-cache-directory={tmp_path / 'cache'}",
        "--model-cache-byte-size=100",
        "--exit-on-error=false",
        "--grpc-port=0",
    ]
    with started(*flags, environment=environment) as server:
        eventually(lambda: "--model-cache-byte-size" in server.errors, "the reason is logged")
        server.wait_ready()
        assert server.stop() == 0
