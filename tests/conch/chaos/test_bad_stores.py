"""Object stores that hang, are busy, cut off what they send, or change; full disks; killed servers."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from tests.support.emulators import Emulator, azure_emulator, gcs_emulator, s3_emulator
from tests.support.faulty_proxy import Fault, Seen
from tests.support.repositories import Place, Told, place_in, stage, tree_of
from tests.support.servers import eventually
from tests.support.waiting import given_time

from conch.core.errors import CancelledError, UnavailableError
from conch_stores.cache import ModelCache
from conch_stores.connection import StoreTimeouts

EMULATORS: dict[str, Callable[[], AbstractContextManager[Emulator]]] = {
    "s3": s3_emulator,
    "gcs": gcs_emulator,
    "azure": azure_emulator,
}
LARGE = os.urandom(12 << 20)
BLOCKS = 6

STAGE = """
import sys
from pathlib import Path
from conch_control.repository.repository_kinds import open_repository
from conch_control.control_options import StorageOptions

repository = open_repository(sys.argv[1], StorageOptions(Path(sys.argv[2]), timeout_s=120))
staged = repository.models()["m"].stage(lambda done, total: print(done, flush=True), lambda: False)
print("staged", staged.directory, flush=True)
sys.stdin.read()
"""


# The first of them is enough for a quick look: what fetches is the same for all.
@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name == "s3" else pytest.mark.slow) for name in EMULATORS],
)
def emulator(request: pytest.FixtureRequest) -> Iterator[Emulator]:
    with EMULATORS[request.param]() as running:
        yield running


@pytest.fixture(scope="module")
def s3() -> Iterator[Emulator]:
    with s3_emulator() as running:
        yield running


@pytest.fixture
def place(emulator: Emulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    with place_in(emulator, tmp_path, monkeypatch) as made:
        yield made


@pytest.fixture
def s3_place(s3: Emulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    with place_in(s3, tmp_path, monkeypatch) as made:
        yield made


def test_a_store_that_hangs_is_an_error_and_recovers(place: Place) -> None:
    place.put("m/1/model.bin", b"content")
    with place.opened() as repository:
        source = repository.models()["m"]
        repository.connection.timeouts = StoreTimeouts.of(1.0)
        place.proxy.fail(Fault.HANG)
        for operation in (repository.models, lambda: stage(source)):
            with pytest.raises(OSError, match=place.bucket.name):
                operation()
        with pytest.raises(UnavailableError, match=place.bucket.name):
            repository.check()
        place.proxy.heal()
        repository.connection.timeouts = StoreTimeouts()
        assert tree_of(stage(source).directory) == {"1/model.bin": b"content"}


def test_a_store_that_hangs_does_not_hold_up_the_end(place: Place) -> None:
    place.put("m/1/model.bin", b"content")
    failed: list[BaseException] = []
    with place.opened(timeout_s=300) as repository:
        place.proxy.fail(Fault.HANG)

        def ask() -> None:
            try:
                repository.models()
            except OSError as error:
                failed.append(error)

        thread = threading.Thread(target=ask)
        thread.start()
        eventually(place.proxy.count, "the store is asked")
    thread.join()
    assert "has been closed" in str(failed[0])


def test_a_store_that_is_busy_for_a_while(place: Place) -> None:
    place.put("m/1/model.bin", b"content")
    with place.opened() as repository:
        place.proxy.fail(Fault.BUSY, times=2)
        source = repository.models()["m"]
        place.proxy.fail(Fault.BUSY, times=2)
        assert tree_of(stage(source).directory) == {"1/model.bin": b"content"}


def test_a_store_that_stays_busy(place: Place) -> None:
    place.put("m/1/model.bin", b"content")
    with place.opened() as repository:
        repository.models()
        repository.connection.timeouts = StoreTimeouts.of(1.0)
        place.proxy.fail(Fault.BUSY)
        place.proxy.seen.clear()
        with pytest.raises(OSError, match="503"):
            repository.models()
        assert place.proxy.count() > 1


@pytest.mark.parametrize("fault", [Fault.TRUNCATE, Fault.DROP])
def test_what_comes_cut_off_is_fetched_again(place: Place, fault: Fault) -> None:
    place.put("m/1/model.bin", LARGE)
    with place.opened() as repository:
        source = repository.models()["m"]
        place.proxy.fail(fault, times=2, path="model.bin", method="GET")
        assert tree_of(stage(source).directory) == {"1/model.bin": LARGE}


def test_what_always_comes_cut_off_is_an_error(place: Place) -> None:
    place.put("m/1/model.bin", LARGE)
    with place.opened() as repository:
        source = repository.models()["m"]
        repository.connection.timeouts = StoreTimeouts.of(2.0)
        place.proxy.fail(Fault.TRUNCATE, path="model.bin", method="GET")
        with pytest.raises(OSError, match=place.bucket.name):
            stage(source)
        place.proxy.heal()
        repository.connection.timeouts = StoreTimeouts()
        assert tree_of(stage(source).directory) == {"1/model.bin": LARGE}


def test_content_that_does_not_fit_its_checksum_is_fetched_again(s3_place: Place) -> None:
    s3_place.put("m/1/model.bin", b"content")
    with s3_place.opened() as repository:
        source = repository.models()["m"]
        s3_place.proxy.fail(Fault.CORRUPT, times=1, path="model.bin", method="GET")
        assert tree_of(stage(source).directory) == {"1/model.bin": b"content"}
        assert len(s3_place.fetched("m/1/model.bin")) == 2


def test_a_checksum_that_is_none_is_found_out(s3_place: Place) -> None:
    """The etags of encrypted objects look like an MD5 and are none."""
    s3_place.put("m/1/model.bin", b"content")
    s3_place.put("n/1/model.bin", b"content")
    with s3_place.opened() as repository:
        models = repository.models()
        # What comes is always the same, and never what the etag says.
        s3_place.proxy.fail(Fault.CORRUPT, path="model.bin", method="GET")
        stage(models["m"])
        stage(models["n"])
        assert len(s3_place.fetched("m/1/model.bin")) == 2
        assert len(s3_place.fetched("n/1/model.bin")) == 1


def test_a_model_that_changes_while_it_is_fetched(place: Place) -> None:
    other = LARGE[::-1]
    place.put("m/1/model.bin", LARGE)
    place.put("m/1/small", b"1")
    changed: list[int] = []

    def change(seen: Seen) -> None:
        if seen.method == "GET" and seen.range and "model.bin" in seen.path and not changed:
            changed.append(1)
            place.put("m/1/model.bin", other)

    place.proxy.choose = change
    with place.opened() as repository:
        staged = stage(repository.models()["m"])
        assert changed
        assert tree_of(staged.directory) == {"1/model.bin": other, "1/small": b"1"}
        assert staged.fingerprint == repository.models()["m"].fingerprint()
        # Nothing is left that could be taken for the old state, of which it was only in part.
        assert list((place.cache / "partial").iterdir()) == []


@pytest.mark.parametrize("then", ["deleted", "shorter"])
def test_a_file_that_goes_while_it_is_fetched(s3_place: Place, then: str) -> None:
    place = s3_place
    place.put("m/1/model.bin", LARGE)
    place.put("m/1/small", b"1")
    seen_blocks: list[int] = []

    def change(seen: Seen) -> None:
        if seen.method == "GET" and seen.range and "model.bin" in seen.path:
            seen_blocks.append(1)
            if len(seen_blocks) == BLOCKS - 1:
                if then == "deleted":
                    place.delete("m/1/model.bin")
                else:
                    place.put("m/1/model.bin", b"short")

    place.proxy.choose = change
    with place.opened() as repository:
        staged = stage(repository.models()["m"])
        left = {} if then == "deleted" else {"1/model.bin": b"short"}
        assert tree_of(staged.directory) == {"1/small": b"1", **left}


def test_a_model_that_never_stays_the_same(s3_place: Place) -> None:
    place = s3_place
    place.put("m/1/model.bin", b"content")
    turn = iter(range(1000))

    def change(seen: Seen) -> None:
        if seen.range and "model.bin" in seen.path:
            place.put("m/1/model.bin", b"%d" % next(turn))

    place.proxy.choose = change
    with place.opened() as repository:
        source = repository.models()["m"]
        with pytest.raises(OSError, match="changes faster than it can be fetched"):
            stage(source)
        place.proxy.heal()
        stage(source)


def test_a_failed_fetch_goes_on_where_it_has_stopped(place: Place) -> None:
    place.put("m/1/model.bin", LARGE)
    place.put("m/1/other.bin", b"other")
    blocks: list[str] = []

    def choose(seen: Seen) -> Fault | None:
        if seen.range and "model.bin" in seen.path:
            blocks.append(seen.range)
            return Fault.BUSY if len(blocks) > 3 else None
        return None

    with place.opened() as repository:
        source = repository.models()["m"]
        place.proxy.choose = choose

        def fail(total_s: float) -> bool:
            """Fetches; False if the time was over before the first blocks had come."""
            repository.connection.timeouts = StoreTimeouts(total_s=total_s)
            with pytest.raises(OSError) as raised:
                stage(source)
            return "503" in str(raised.value)

        given_time(fail, 3)
        repository.connection.timeouts = StoreTimeouts()
        done = list(blocks[:3])
        place.proxy.heal()
        place.proxy.seen.clear()
        assert tree_of(stage(source).directory) == {"1/model.bin": LARGE, "1/other.bin": b"other"}
        again = place.fetched("m/1/model.bin")
        assert len(again) < BLOCKS
        assert not set(again) & set(done[:1])
        assert place.fetched("m/1/other.bin") == []


def test_a_stage_that_is_cancelled(place: Place) -> None:
    place.put("m/1/model.bin", LARGE)
    with place.opened() as repository:
        source = repository.models()["m"]
        place.proxy.fail(Fault.HANG, path="model.bin")
        cancel = threading.Event()
        told = Told()

        def cancelled() -> bool:
            if place.proxy.count("model.bin"):
                cancel.set()
            return cancel.is_set()

        with pytest.raises(CancelledError):
            source.stage(told, cancelled)
        place.proxy.heal()
        assert [path.name for path in repository.cache.own_directory.iterdir()] == ["lock"]
        assert tree_of(stage(source).directory) == {"1/model.bin": LARGE}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_reported_and_recovers(s3_place: Place, number: int) -> None:
    place = s3_place
    place.put("m/1/model.bin", LARGE)
    place.put("old/1/model.bin", b"o" * 1000)
    full = threading.Event()
    room = [5 << 20]

    def write(descriptor: int, data: bytes, offset: int) -> int:
        if full.is_set():
            if room[0] < len(data):
                raise OSError(number, os.strerror(number))
            room[0] -= len(data)
        return os.pwrite(descriptor, data, offset)

    with place.opened() as repository:
        repository.cache.write = write
        models = repository.models()
        served = stage(models["old"])
        full.set()
        with pytest.raises(OSError, match=r"the disk of the model cache .* is full") as caught:
            stage(models["m"])
        assert caught.value.errno == number
        assert [path.name for path in repository.cache.own_directory.iterdir() if path.suffix] == []
        assert tree_of(served.directory) == {"1/model.bin": b"o" * 1000}
        # Unused files make room by themselves.
        served.release()

        def free(size: int) -> bool:
            freed = ModelCache.free(repository.cache, size)
            if freed:
                room[0] += 20 << 20
            return freed

        repository.cache.free = free  # type: ignore[method-assign]
        assert tree_of(stage(models["m"]).directory) == {"1/model.bin": LARGE}
        assert list(place.blobs().values()) == [len(LARGE)]


def staging_process(place: Place) -> subprocess.Popen[str]:
    root = Path(__file__).resolve().parents[3]
    return subprocess.Popen(
        [sys.executable, "-c", STAGE, place.location, str(place.cache)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{root / 'services'}:{root / 'control'}"},
    )


def end(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()


def test_a_killed_fetch_goes_on_where_it_has_stopped(s3_place: Place) -> None:
    place = s3_place
    place.put("m/1/model.bin", LARGE)
    blocks: list[str] = []

    def choose(seen: Seen) -> Fault | None:
        if seen.range and "model.bin" in seen.path:
            blocks.append(seen.range)
            return Fault.HANG if len(blocks) > 4 else None
        return None

    place.proxy.choose = choose
    process = staging_process(place)

    def partial() -> list[Path]:
        return list((place.cache / "partial").glob("*"))

    try:
        eventually(lambda: partial() and partial()[0].stat().st_size >= 4 << 20, "some blocks are there")
    finally:
        end(process)
    assert list((place.cache / "owners").glob("*/*.wanted"))
    place.proxy.heal()
    place.proxy.seen.clear()
    with place.opened() as repository:
        staged = stage(repository.models()["m"])
        assert tree_of(staged.directory) == {"1/model.bin": LARGE}
        assert len(place.fetched("m/1/model.bin")) <= BLOCKS - 2
        # What the killed one has left is gone.
        assert [path.name for path in (place.cache / "owners").iterdir()] == [
            repository.cache.own_directory.name
        ]
        assert partial() == []


def test_two_servers_share_a_cache(s3_place: Place) -> None:
    place = s3_place
    place.put("m/1/model.bin", LARGE)
    process = staging_process(place)
    try:
        with place.opened() as repository:
            staged = stage(repository.models()["m"])
            assert process.stdout is not None
            theirs = ""
            for line in process.stdout:
                if line.startswith("staged "):
                    theirs = line.removeprefix("staged ").strip()
                    break
            assert len(place.fetched("m/1/model.bin")) == BLOCKS  # by one for both
            assert Path(theirs) != staged.directory
            assert tree_of(Path(theirs)) == tree_of(staged.directory) == {"1/model.bin": LARGE}
        assert tree_of(Path(theirs)) == {"1/model.bin": LARGE}
    finally:
        end(process)


def test_the_budget_holds_while_models_come_and_go(s3_place: Place) -> None:
    place = s3_place
    size = 100_000
    for number in range(6):
        place.put(f"m{number}/1/model.bin", bytes([number]) * size)
    with place.opened(cache_bytes=3 * size) as repository:
        models = repository.models()
        served = stage(models["m0"])
        for number in range(1, 6):
            stage(models[f"m{number}"]).release()
            assert sum(place.blobs().values()) <= 3 * size
            assert tree_of(served.directory) == {"1/model.bin": bytes(size)}
        # The last two are still there, the one in use too.
        place.proxy.seen.clear()
        others = [stage(models["m4"]), stage(models["m5"])]
        assert place.proxy.count("model.bin") == 0
        with pytest.raises(OSError, match="--model-cache-byte-size") as caught:
            stage(models["m1"])
        assert caught.value.errno == errno.ENOSPC
        assert str(3 * size) in str(caught.value)
        others[0].release()
        stage(models["m1"])
        assert sum(place.blobs().values()) <= 3 * size
