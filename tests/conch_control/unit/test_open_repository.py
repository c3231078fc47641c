"""The choice of the kind of repository."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path

import pytest

from conch.core.errors import InvalidArgumentError, UnsupportedError
from conch_control.control_options import StorageOptions
from conch_control.repository.local import LocalRepository
from conch_control.repository.repository_kinds import GROUP, open_repository
from conch_stores import cache_directory
from conch_stores.locations import Location

S3 = Location("s3", "s3://b", "b")


KINDS = """
from conch_control.repository.local import LocalRepository
from pathlib import Path

def open_tape(location, options):
    return LocalRepository(Path(location.removeprefix("tape://"), str(options.timeout_s)))
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A distribution with kinds of repositories, as pip would leave it."""
    (tmp_path / "tape_kind.py").write_text(KINDS)
    (tmp_path / "drum_kind.py").write_text("import a_package_nobody_has")
    info = tmp_path / "reels-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: reels\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        f"[{GROUP}]\ntape = tape_kind:open_tape\ndrum = drum_kind:open_drum [drums]\n"
        "roll = drum_kind:open_roll\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))


def test_local_ones(tmp_path: Path) -> None:
    for location in (tmp_path, str(tmp_path)):
        with closing(open_repository(location)) as repository:
            assert isinstance(repository, LocalRepository)
            assert repository.location == str(tmp_path)


@pytest.mark.parametrize("text", ["/models", "models", "C:/models", ":///x", "1://x"])
def test_what_has_no_scheme_is_a_path(text: str) -> None:
    repository = open_repository(text)
    assert isinstance(repository, LocalRepository)
    assert repository.location == str(Path(text).absolute())


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "hdfs://host/path",
            "scheme 'hdfs' is not known; known are s3://, mlflow+http://, mlflow://, gs://, ",
        ),
        ("S3://bucket", "scheme 'S3' is not known"),
        ("file:///models", "scheme 'file' is not known"),
    ],
)
def test_an_unknown_scheme_is_named(text: str, reason: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        open_repository(text)
    assert reason in caught.value.message
    assert text in caught.value.message


def test_a_password_in_a_url_is_not_shown() -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        open_repository("ftp://key:hush-hush@host/x")
    assert "hush-hush" not in caught.value.message


@pytest.mark.usefixtures("installed")
def test_another_package_adds_a_scheme() -> None:
    with closing(open_repository("tape:///reel", StorageOptions(timeout_s=7.5))) as repository:
        assert repository.location == "/reel/7.5"
    with pytest.raises(InvalidArgumentError, match=r"known are .*tape://.* and local paths"):
        open_repository("wax://cylinder")


@pytest.mark.usefixtures("installed")
def test_a_package_that_another_kind_misses_is_named() -> None:
    with pytest.raises(UnsupportedError) as caught:
        open_repository("drum://a/b/")
    assert caught.value.message == (
        "model repository 'drum://a/b': drum:// needs the package 'a_package_nobody_has', which is not "
        "installed; install it with: pip install 'reels[drums]'"
    )
    with pytest.raises(UnsupportedError, match=r"which is not installed$"):
        open_repository("roll://key:hush@a")


def test_a_malformed_url_is_refused_before_a_package_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "conch_stores.s3", raising=False)
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(InvalidArgumentError, match="the name of the bucket is missing"):
        open_repository("s3://")


@pytest.mark.parametrize(
    ("location", "package", "extra"),
    [("s3://b", "s3fs", "s3"), ("gs://b", "gcsfs", "gcs"), ("as://a/c", "azure.storage.blob.aio", "azure")],
)
def test_a_missing_package_is_named_with_its_extra(
    location: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, f"conch_stores.{extra}", raising=False)
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
    imports = "import sys, conch.cli.serve_command, conch_stores"
    code = f"{imports}; print([n for n in {names} if n in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_where_the_cache_is(tmp_path: Path) -> None:
    environment = {"HOME": "/home/me"}
    mount = "TRITON_AWS_MOUNT_DIRECTORY"
    assert cache_directory(StorageOptions(), environment, mount) == Path("/home/me/.cache/conch/models")
    environment["XDG_CACHE_HOME"] = "/caches"
    assert cache_directory(StorageOptions(), environment, mount) == Path("/caches/conch/models")
    environment[mount] = str(tmp_path)
    environment["TRITON_GCS_MOUNT_DIRECTORY"] = "/elsewhere"
    assert cache_directory(StorageOptions(), environment, mount) == tmp_path
    assert cache_directory(StorageOptions(Path("/mine")), environment, mount) == Path("/mine")
    environment[mount] = str(tmp_path / "none")
    with pytest.raises(
        InvalidArgumentError, match=r"TRITON_AWS_MOUNT_DIRECTORY: '.*none' is not a directory"
    ):
        cache_directory(StorageOptions(), environment, mount)


def test_a_cache_that_can_not_be_made(tmp_path: Path) -> None:
    pytest.importorskip("s3fs")
    (tmp_path / "file").touch()
    repository = open_repository("s3://127.0.0.1:1/b", StorageOptions(tmp_path / "file" / "cache"))
    with (
        closing(repository),
        pytest.raises(InvalidArgumentError, match=r"--model-cache-directory: .* can't be"),
    ):
        repository.check()
