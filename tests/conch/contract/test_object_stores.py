"""Repositories in object stores, against servers that speak their protocols."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing
from pathlib import Path

import pytest
from tests.support.emulators import (
    AZURE_ACCOUNT,
    AZURE_KEY,
    Emulator,
    azure_emulator,
    gcs_emulator,
    s3_emulator,
)
from tests.support.loading import config_json, load, model_text, number_config
from tests.support.repositories import Place, Told, place_in, stage, tree_of
from tests.support.servers import RawClient, serving

from conch.core.errors import InvalidArgumentError
from conch_control.control_options import StorageOptions
from conch_control.repository.layout import version_numbers
from conch_control.repository.repository_kinds import open_repository

pytestmark = pytest.mark.process

EMULATORS: dict[str, Callable[[], AbstractContextManager[Emulator]]] = {
    "s3": s3_emulator,
    "gcs": gcs_emulator,
    "azure": azure_emulator,
}


@pytest.fixture(scope="module", params=EMULATORS)
def emulator(request: pytest.FixtureRequest) -> Iterator[Emulator]:
    with EMULATORS[request.param]() as running:
        yield running


@pytest.fixture
def place(emulator: Emulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    with place_in(emulator, tmp_path, monkeypatch) as made:
        yield made


def test_models_are_the_directories(place: Place) -> None:
    place.put("a/config.pbtxt", b"platform: 'x'")
    place.put("a/1/model.bin", b"12345")
    place.put("b/3/deep/er/file with space+%41.txt", b"deep")
    place.put("readme.txt", b"no model")
    place.bucket.put("elsewhere/c/1/model.bin", b"not here")
    place.bucket.put(f"{place.prefix}-too/c/1/model.bin", b"not here")
    with place.opened() as repository:
        repository.check()
        models = repository.models()
        assert sorted(models) == ["a", "b"]
        assert models["a"].location == f"{place.location}/a"
        assert models["a"].read("config.pbtxt") == b"platform: 'x'"
        with pytest.raises(FileNotFoundError):
            models["a"].read("nothing")
        with pytest.raises(FileNotFoundError):
            models["a"].read("1")
        staged = stage(models["b"])
        assert tree_of(staged.directory) == {"3/deep/er/file with space+%41.txt": b"deep"}
        assert staged.directory.name == "b"


def test_models_of_a_store_of_others_are_data(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    place.put("code/config.pbtxt", number_config().encode())
    place.put("code/1/model.py", model_text(1).encode())
    place.put("config/config.pbtxt", b'backend: "openvino" parameters { key: "CACHE_DIR" }')
    place.put("config/1/model.xml")
    place.put("text/config.pbtxt", b'backend: "fil"')
    place.put("text/1/notes.txt", model_text(1).encode())
    flags = [f"--model-repository={place.location}", f"--model-cache-directory={place.cache}"]
    flags.append("--model-control-mode=explicit")
    with (
        serving(flags=[*flags, "--storage-data-only"]) as server,
        closing(RawClient(server.address)) as client,
    ):
        override = config_json(default_model_filename="notes.txt")
        for name, parameters, reason in (
            ("code", {}, "it brings code ('1/model.py')"),
            ("config", {}, "it brings a directory to write to (parameter 'CACHE_DIR' of its config)"),
            (
                "text",
                {"config": override},
                "it brings files that can be code (backend 'python' of its config)",
            ),
        ):
            assert load(client, name, parameters) == (
                "INTERNAL",
                f"failed to load '{name}', failed to poll from model repository: {reason}, and "
                "--storage-data-only is on",
            )
            assert f"'{name}': {reason}, and --storage-data-only is on" in caplog.text
    with serving(flags=flags) as server, closing(RawClient(server.address)) as client:
        assert load(client, "code") == {}


def test_a_whole_bucket_is_a_repository(place: Place) -> None:
    place.prefix = ""
    place.bucket.put("m/1/model.bin", b"root")
    with place.opened() as repository:
        repository.check()
        assert tree_of(stage(repository.models()["m"]).directory) == {"1/model.bin": b"root"}


def test_an_empty_bucket_is_an_empty_repository(place: Place) -> None:
    place.prefix = ""
    with place.opened() as repository:
        repository.check()
        assert repository.models() == {}


def test_a_bucket_or_path_that_is_not_there(place: Place) -> None:
    with place.opened() as repository:
        with pytest.raises(InvalidArgumentError, match="repository path is not a valid directory"):
            repository.check()
        assert repository.models() == {}
    place.bucket.name += "-not"
    with place.opened() as repository:
        with pytest.raises(InvalidArgumentError, match="repository path is not a valid directory"):
            repository.check()
        # Not an empty one: that would take all its models out of service.
        with pytest.raises(FileNotFoundError, match=place.bucket.name):
            repository.models()


def test_a_fingerprint_changes_with_every_kind_of_change(place: Place) -> None:
    def look() -> object:
        with place.opened() as repository:
            return repository.models()["m"].fingerprint()

    place.put("m/config.pbtxt", b"c")
    place.put("m/1/model.bin", b"one")
    seen = [look()]
    assert look() == seen[0]
    place.put("m/1/model.bin", b"two")  # of the same size
    seen.append(look())
    place.put("m/2/model.bin", b"two")
    seen.append(look())
    place.delete("m/1/model.bin")
    seen.append(look())
    assert len(set(map(repr, seen))) == len(seen)
    with place.opened() as repository:
        source = repository.models()["m"]
        assert source.fingerprint() == seen[-1] == stage(source).fingerprint


def test_empty_files_and_empty_directories_are_there(place: Place) -> None:
    if place.location.startswith("gs://"):
        pytest.skip("this emulator can't hold an object whose name ends with a slash")
    place.put("ensemble/config.pbtxt", b"platform: 'ensemble'")
    place.put("ensemble/1/", b"")
    place.put("ensemble/labels.txt", b"")
    with place.opened() as repository:
        staged = stage(repository.models()["ensemble"])
        assert version_numbers(staged.directory) == [1]
        assert tree_of(staged.directory)["labels.txt"] == b""


def test_one_listing_says_which_models_there_are_and_in_what_state(place: Place) -> None:
    for number in range(12):
        place.put(f"m{number // 4}/1/{number}")
    with place.opened() as repository:
        repository.check()
        before = place.proxy.count()
        models = repository.models()
        assert [len(source.fingerprint()) for source in models.values()] == [5, 5, 5]
        assert place.proxy.count() - before == 1


def test_a_large_file_comes_whole_and_in_blocks(place: Place) -> None:
    content = os.urandom((5 << 20) + 17)
    place.put("m/1/model.bin", content)
    with place.opened() as repository:
        told = Told()
        staged = stage(repository.models()["m"], told)
        assert (staged.directory / "1/model.bin").read_bytes() == content
        assert len(place.fetched("m/1/model.bin")) == 3
        assert told.steps[-1] == (len(content), len(content))
        assert [done for done, _ in told.steps] == sorted(done for done, _ in told.steps)


def test_only_what_has_changed_is_fetched(place: Place) -> None:
    for number in range(4):
        place.put(f"m/1/file{number}", b"%d" % number)
    with place.opened() as repository:
        first = stage(repository.models()["m"])
        assert [len(place.fetched(f"m/1/file{number}")) for number in range(4)] == [1, 1, 1, 1]

        place.proxy.seen.clear()
        again = stage(repository.models()["m"])
        assert again.directory == first.directory  # nothing to fetch, and nothing to make
        assert [place.fetched(f"m/1/file{number}") for number in range(4)] == [[], [], [], []]

        place.put("m/1/file2", b"other")
        place.proxy.seen.clear()
        second = stage(repository.models()["m"])
        assert [len(place.fetched(f"m/1/file{number}")) for number in range(4)] == [0, 0, 1, 0]
        assert second.directory != first.directory
        assert (second.directory / "1/file2").read_bytes() == b"other"
        assert (first.directory / "1/file2").read_bytes() == b"2"
        first.release()
        first.release()
        assert first.directory.exists()  # the other one still has it
        again.release()
        assert not first.directory.exists()
        assert (second.directory / "1/file0").read_bytes() == b"0"
    assert not second.directory.exists()

    place.proxy.seen.clear()
    with place.opened() as repository:  # after a restart too
        assert (stage(repository.models()["m"]).directory / "1/file2").read_bytes() == b"other"
    assert [place.fetched(f"m/1/file{number}") for number in range(4)] == [[], [], [], []]


def test_a_poll_without_changes_only_lists(place: Place) -> None:
    place.put("m/config.pbtxt", b"c")
    place.put("m/1/model.bin")
    with place.opened() as repository:
        source = repository.models()["m"]
        state = source.fingerprint(), source.read("config.pbtxt")
        place.proxy.seen.clear()
        source = repository.models()["m"]
        assert (source.fingerprint(), source.read("config.pbtxt")) == state
        assert len(place.proxy.seen) == 1
        assert place.fetched("m/config.pbtxt") == []


def test_a_file_that_is_replaced_after_the_listing(place: Place) -> None:
    place.put("m/config.pbtxt", b"first")
    with place.opened() as repository:
        source = repository.models()["m"]
        place.put("m/config.pbtxt", b"other, and longer")
        assert source.read("config.pbtxt") == b"other, and longer"
        place.put("m/config.pbtxt", b"first")
        # Nothing else was kept under its name.
        assert repository.models()["m"].read("config.pbtxt") == b"first"
        source = repository.models()["m"]
        place.delete("m/config.pbtxt")
        assert source.read("config.pbtxt") == b"first"  # of the listing, as it is in the cache
        assert repository.models() == {}


def test_names_that_no_directory_can_hold(place: Place, tmp_path: Path) -> None:
    place.put("good/1/model.bin")
    place.put("bad/1/model.bin")
    place.put("bad/1//x")
    place.put("both/1/model.bin")
    place.put("both/1/model.bin/inside")
    with place.opened() as repository:
        models = repository.models()
        with pytest.raises(OSError, match="name can't be that of a file"):
            stage(models["bad"])
        with pytest.raises(OSError, match="is an object and a directory"):
            stage(models["both"])
        stage(models["good"])


def test_a_model_that_has_gone(place: Place) -> None:
    place.put("m/1/model.bin")
    place.put("n/1/model.bin")
    with place.opened() as repository:
        source = repository.models()["m"]
        place.delete("m/1/model.bin")
        with pytest.raises(FileNotFoundError, match="there is no model 'm'"):
            stage(source)


def test_wrong_credentials_are_refused_and_kept_secret(
    emulator: Emulator, place: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if not place.location.startswith("as://"):
        pytest.skip("this emulator takes any credentials")
    place.put("m/1/model.bin")
    wrong = AZURE_KEY.replace("E", "F")
    monkeypatch.setenv(
        "AZURE_STORAGE_CONNECTION_STRING",
        os.environ["AZURE_STORAGE_CONNECTION_STRING"].replace(AZURE_KEY, wrong),
    )
    with place.opened() as repository:
        with pytest.raises(PermissionError) as caught:
            repository.models()
        assert wrong not in str(caught.value)
        with pytest.raises(InvalidArgumentError, match="not a valid directory"):
            repository.check()


def test_the_credential_file_is_used(place: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if not place.location.startswith("s3://"):
        pytest.skip("the others' entries name no server of one's own")
    place.put("m/1/model.bin")
    file = tmp_path / "credentials.json"
    monkeypatch.setenv("TRITON_CLOUD_CREDENTIAL_PATH", str(file))
    file.write_text(json.dumps({"s3": {"s3://elsewhere": {}}}))
    with place.opened() as repository:
        with pytest.raises(InvalidArgumentError, match="Cannot match credential for path  s3://127"):
            repository.models()
        entry = {"key_id": "me", "secret_key": "hush", "region": "us-east-1"}
        file.write_text(json.dumps({"s3": {"s3://127.0.0.1": entry}}))
        assert sorted(repository.models()) == ["m"]


def test_the_account_of_a_connection_string_is_checked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("azure.storage.blob")
    monkeypatch.setenv(
        "AZURE_STORAGE_CONNECTION_STRING",
        f"AccountName={AZURE_ACCOUNT};AccountKey={AZURE_KEY};BlobEndpoint=http://127.0.0.1:1/{AZURE_ACCOUNT}",
    )
    repository = open_repository("as://somebody/container", StorageOptions(tmp_path / "cache"))
    with closing(repository), pytest.raises(OSError, match=f"is for account '{AZURE_ACCOUNT}'"):
        repository.models()
