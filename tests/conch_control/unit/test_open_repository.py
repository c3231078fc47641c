"""The choice of the kind of repository."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path

import pytest

from conch.core.errors import InvalidArgumentError, UnsupportedError
from conch_control.control_options import StorageOptions
from conch_control.repository.local import LocalRepository
from conch_control.repository.storage import cache_directory, open_repository
from conch_control.repository.storage.locations import Location

S3 = Location("s3", "s3://b", "b")


def test_local_ones(tmp_path: Path) -> None:
    for location in (tmp_path, str(tmp_path)):
        with closing(open_repository(location)) as repository:
            assert isinstance(repository, LocalRepository)
            assert repository.location == str(tmp_path)


@pytest.mark.parametrize(
    ("location", "package", "extra"),
    [("s3://b", "s3fs", "s3"), ("gs://b", "gcsfs", "gcs"), ("as://a/c", "azure.storage.blob.aio", "azure")],
)
def test_a_missing_package_is_named_with_its_extra(
    location: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, f"conch_control.repository.storage.{extra}", raising=False)
    for name in (package, f"{package}.core"):  # it may have been imported by another test
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UnsupportedError) as caught:
        open_repository(location)
    assert f"pip install 'conch[{extra}]'" in caught.value.message
    assert location in caught.value.message


@pytest.mark.process
def test_no_store_s_package_is_imported_before_it_is_needed() -> None:
    import subprocess

    names = "s3fs", "gcsfs", "azure", "aiobotocore", "fsspec"
    imports = "import sys, conch.cli.serve_command, conch_control.repository.storage"
    code = f"{imports}; print([n for n in {names} if n in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_where_the_cache_is(tmp_path: Path) -> None:
    environment = {"HOME": "/home/me"}
    assert cache_directory(S3, StorageOptions(), environment) == Path("/home/me/.cache/conch/models")
    environment["XDG_CACHE_HOME"] = "/caches"
    assert cache_directory(S3, StorageOptions(), environment) == Path("/caches/conch/models")
    environment["TRITON_AWS_MOUNT_DIRECTORY"] = str(tmp_path)
    environment["TRITON_GCS_MOUNT_DIRECTORY"] = "/elsewhere"
    assert cache_directory(S3, StorageOptions(), environment) == tmp_path
    assert cache_directory(S3, StorageOptions(Path("/mine")), environment) == Path("/mine")
    environment["TRITON_AWS_MOUNT_DIRECTORY"] = str(tmp_path / "none")
    with pytest.raises(
        InvalidArgumentError, match=r"TRITON_AWS_MOUNT_DIRECTORY: '.*none' is not a directory"
    ):
        cache_directory(S3, StorageOptions(), environment)


def test_a_cache_that_can_not_be_made(tmp_path: Path) -> None:
    pytest.importorskip("s3fs")
    (tmp_path / "file").touch()
    repository = open_repository("s3://127.0.0.1:1/b", StorageOptions(tmp_path / "file" / "cache"))
    with (
        closing(repository),
        pytest.raises(InvalidArgumentError, match=r"--model-cache-directory: .* can't be"),
    ):
        repository.check()
