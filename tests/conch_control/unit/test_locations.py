"""URLs of object stores."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conch.core.errors import InvalidArgumentError
from conch_stores.locations import Location, parse_location

NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True)
PARTS = st.lists(
    st.text(st.characters(exclude_characters="/", exclude_categories=["C", "Z"]), min_size=1).filter(
        lambda part: part not in (".", "..")
    ),
    max_size=4,
)
HOSTS = st.one_of(NAMES, st.ip_addresses(v=4).map(str), st.ip_addresses(v=6).map(lambda ip: f"[{ip}]"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("s3://bucket", Location("s3", "s3://bucket", "bucket")),
        ("s3://bucket/", Location("s3", "s3://bucket", "bucket")),
        ("s3://bucket/a/b", Location("s3", "s3://bucket/a/b", "bucket", "a/b/")),
        ("s3://bucket//a///b//", Location("s3", "s3://bucket//a///b", "bucket", "a/b/")),
        (
            "s3://localhost:4566/bucket/a",
            Location("s3", "s3://localhost:4566/bucket/a", "bucket", "a/", "http://localhost:4566"),
        ),
        (
            "s3://http://10.0.0.1:80/bucket",
            Location("s3", "s3://http://10.0.0.1:80/bucket", "bucket", "", "http://10.0.0.1:80"),
        ),
        (
            "s3://https://minio.example.com:9000/bucket/a",
            Location(
                "s3",
                "s3://https://minio.example.com:9000/bucket/a",
                "bucket",
                "a/",
                "https://minio.example.com:9000",
            ),
        ),
        (
            "s3://https://minio.example.com/bucket",
            Location(
                "s3", "s3://https://minio.example.com/bucket", "bucket", "", "https://minio.example.com:443"
            ),
        ),
        ("gs://bucket/a", Location("gs", "gs://bucket/a", "bucket", "a/")),
        ("as://account/container", Location("as", "as://account/container", "container", account="account")),
        (
            "as://account/container/a/b/",
            Location("as", "as://account/container/a/b", "container", "a/b/", account="account"),
        ),
    ],
)
def test_spellings(text: str, expected: Location) -> None:
    assert parse_location(text) == expected


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("s3://", "the name of the bucket is missing or wrong; write s3://bucket/path, s3://host:port"),
        ("s3:///path", "the name of the bucket is missing"),
        ("s3://host:9000", "the name of the bucket is missing"),
        ("s3://host:99999/bucket", "99999 is not a port"),
        ("s3://buc ket/path", "the name of the bucket is missing or wrong"),
        ("gs://bucket/a/../b", "must not hold '.' or '..'"),
        ("gs://bucket/a\nb", "its path is not text"),
        ("as://account", "the name of the container is missing or wrong; write as://account/container/path"),
        ("as:///container", "the name of the account is missing"),
    ],
)
def test_what_is_wrong_is_said(text: str, reason: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        parse_location(text)
    assert reason in caught.value.message
    assert text in caught.value.message


def test_a_password_in_a_url_is_not_shown() -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        parse_location("s3://key:hush-hush@host:9000/bucket")
    assert "hush-hush" not in caught.value.message


@given(NAMES, PARTS, st.sampled_from(["s3", "gs"]))
def test_bucket_and_path_are_found_again(bucket: str, parts: list[str], scheme: str) -> None:
    path = "/".join(parts)
    location = parse_location(f"{scheme}://{bucket}/{path}")
    assert (location.scheme, location.bucket, location.endpoint) == (scheme, bucket, "")
    assert location.prefix == (f"{path}/" if parts else "")
    assert parse_location(location.text) == location


@given(NAMES, NAMES, PARTS)
def test_account_and_container_are_found_again(account: str, container: str, parts: list[str]) -> None:
    location = parse_location("/".join([f"as://{account}", container, *parts]))
    assert (location.account, location.bucket) == (account, container)
    assert location.prefix == "".join(f"{part}/" for part in parts)


@given(st.sampled_from(["", "http://", "https://"]), HOSTS, st.integers(1, 65535), NAMES, PARTS)
def test_the_endpoint_is_found_again(
    protocol: str, host: str, port: int, bucket: str, parts: list[str]
) -> None:
    location = parse_location("/".join([f"s3://{protocol}{host}:{port}", bucket, *parts]))
    assert location.endpoint == f"{protocol or 'http://'}{host}:{port}"
    assert (location.bucket, location.prefix) == (bucket, "".join(f"{part}/" for part in parts))


@given(st.sampled_from(["s3", "gs", "as"]), st.text())
def test_anything_is_read_or_refused(scheme: str, rest: str) -> None:
    try:
        location = parse_location(f"{scheme}://{rest}")
    except InvalidArgumentError as error:
        assert "model repository '" in error.message
    else:
        assert ".." not in location.prefix.split("/")
        assert not location.prefix.startswith("/")
