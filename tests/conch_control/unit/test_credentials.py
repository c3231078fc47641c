"""Identity of the server to a store."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conch.core.errors import InvalidArgumentError
from conch_stores.credentials import (
    AzureCredentials,
    CredentialReader,
    Credentials,
    GcsCredentials,
    S3Credentials,
    from_environment,
    match,
    redacted,
)
from conch_stores.locations import Location, parse_location

FILE = {
    "s3": {
        "": {"key_id": "default", "secret_key": "hush-default"},
        "s3://bucket": {"key_id": "one", "secret_key": "hush-one", "region": "eu", "session_token": "hush-t"},
        "s3://bucket/deep": {"profile": "two"},
    },
    "gs": {"": "/etc/gcs.json", "gs://other": "/etc/other.json"},
    "as": {"as://account": {"account_str": "account", "account_key": "hush-key"}},
}


def at(text: str) -> Location:
    location = parse_location(text)
    assert isinstance(location, Location)
    return location


def write(path: Path, content: Any) -> dict[str, str]:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return {"TRITON_CLOUD_CREDENTIAL_PATH": str(path)}


@pytest.mark.parametrize(
    ("location", "expected"),
    [
        ("s3://elsewhere/x", S3Credentials("default", "hush-default")),
        ("s3://bucket/x", S3Credentials("one", "hush-one", "hush-t", "eu")),
        ("s3://bucket/deep/er", S3Credentials(profile="two")),
        ("gs://bucket", GcsCredentials("/etc/gcs.json")),
        ("gs://other/x", GcsCredentials("/etc/other.json")),
        ("as://account/container", AzureCredentials("account", "hush-key")),
    ],
)
def test_the_longest_matching_prefix_of_the_file_wins(
    location: str, expected: Credentials, tmp_path: Path
) -> None:
    environment = write(tmp_path / "file", FILE) | {"AZURE_STORAGE_KEY": "other"}
    assert CredentialReader(environment).read(at(location)) == expected


def test_the_file_is_read_again_when_nothing_matches(tmp_path: Path) -> None:
    file = tmp_path / "file"
    reader = CredentialReader(write(file, {"s3": {"s3://one": {"profile": "first"}}}))
    assert reader.read(at("s3://one")) == S3Credentials(profile="first")
    write(file, {"s3": {"s3://one": {"profile": "second"}, "s3://two": {}}})
    assert reader.read(at("s3://one")) == S3Credentials(profile="first")
    assert reader.read(at("s3://two")) == S3Credentials()
    assert reader.read(at("s3://one")) == S3Credentials(profile="second")
    with pytest.raises(InvalidArgumentError, match=r"^Cannot match credential for path  gs://one$"):
        reader.read(at("gs://one"))


def test_the_file_is_read_again_when_it_did_not_do(tmp_path: Path) -> None:
    file = tmp_path / "file"
    reader = CredentialReader(write(file, {"s3": {"": {"profile": "first"}}}))
    reader.read(at("s3://one"))
    write(file, {"s3": {"": {"profile": "second"}}})
    reader.forget()
    assert reader.read(at("s3://one")) == S3Credentials(profile="second")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "is not JSON: .* in line 1, column 2"),
        ("[]", "must be an object with 's3', 'gs' and 'as'"),
        ({"s3": []}, "'s3' must be an object"),
        ({"s3": {"": "x"}}, "must be an object"),
        ({"s3": {"": {"key_id": 1}}}, "'key_id' must be a string"),
        ({"s3": {"": {"key_id": "hush"}}}, "'key_id' and 'secret_key' must be given together"),
        ({"s3": {"": {"secret_key": "hush"}}}, "'key_id' and 'secret_key' must be given together"),
    ],
)
def test_a_wrong_file_is_said_to_be_without_what_it_holds(content: Any, reason: str, tmp_path: Path) -> None:
    reader = CredentialReader(write(tmp_path / "file", content))
    with pytest.raises(InvalidArgumentError, match=reason) as caught:
        reader.read(at("s3://bucket"))
    assert str(tmp_path / "file") in caught.value.message
    assert "hush" not in caught.value.message


def test_other_wrong_files(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="can't be read: No such file"):
        CredentialReader({"TRITON_CLOUD_CREDENTIAL_PATH": str(tmp_path / "none")}).read(at("s3://b"))
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidArgumentError, match="is not text"):
        CredentialReader({"TRITON_CLOUD_CREDENTIAL_PATH": str(tmp_path / "binary")}).read(at("s3://b"))
    with pytest.raises(InvalidArgumentError, match="must be the path of a file"):
        CredentialReader(write(tmp_path / "file", {"gs": {"": {}}})).read(at("gs://b"))
    with pytest.raises(InvalidArgumentError, match=r"of account 'a', .* in account 'b'"):
        CredentialReader(
            write(tmp_path / "file", {"as": {"": {"account_str": "a", "account_key": "hush"}}})
        ).read(at("as://b/c"))


def test_the_environment() -> None:
    # The AWS library reads its own variables, profiles and services.
    assert from_environment(at("s3://b"), {"AWS_ACCESS_KEY_ID": "x"}) == S3Credentials()
    assert from_environment(at("gs://b"), {}) == GcsCredentials()
    assert from_environment(at("gs://b"), {"GOOGLE_APPLICATION_CREDENTIALS": "/k"}) == GcsCredentials("/k")
    assert from_environment(at("gs://b"), {"STORAGE_EMULATOR_HOST": "http://x"}).emulated  # type: ignore[union-attr]
    environment = {"AZURE_STORAGE_ACCOUNT": "a", "AZURE_STORAGE_KEY": "hush"}
    assert from_environment(at("as://a/c"), environment) == AzureCredentials("a", "hush")
    environment = {"AZURE_STORAGE_AUTH_TYPE": "managed_identity", "AZURE_STORAGE_CLIENT_ID": "me"}
    assert from_environment(at("as://a/c"), environment) == AzureCredentials(
        auth_type="managed_identity", client_id="me"
    )
    with pytest.raises(
        InvalidArgumentError, match="AZURE_STORAGE_AUTH_TYPE: must be one of managed_identity"
    ):
        from_environment(at("as://a/c"), {"AZURE_STORAGE_AUTH_TYPE": "magic"})


@given(st.lists(st.text(alphabet="ab/", max_size=6)), st.text(alphabet="ab/", max_size=8))
def test_the_longest_prefix_is_found(prefixes: list[str], path: str) -> None:
    found = match(prefixes, path)
    fitting = [prefix for prefix in prefixes if path[: len(prefix)] == prefix]
    if found is None:
        assert not fitting
    else:
        assert found in fitting
        assert all(len(prefix) <= len(found) for prefix in fitting)


@given(st.lists(st.text(alphabet="abc", max_size=4), max_size=4), st.text(alphabet="abcd "))
def test_no_secret_is_left_in_a_text(secrets: list[str], text: str) -> None:
    shown = redacted(text, secrets)
    assert not [secret for secret in secrets if secret and secret in shown.replace("***", "\n")]


def test_secrets_are_not_represented() -> None:
    string = "AccountName=a;AccountKey=hush==;BlobEndpoint=http://x"
    found: list[Credentials] = [
        S3Credentials("id", "hush", "hush-token"),
        AzureCredentials("a", "hush", connection_string=string),
    ]
    assert "hush" not in repr(found)
    assert "hush" not in redacted(f"failed: hush== {string}", found[1].secrets())
