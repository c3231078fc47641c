"""The cache: entries are made once, are complete or absent, and stay while in use."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.support.servers import WAIT_S, eventually

from conch.core.errors import InvalidArgumentError, UnavailableError
from conch_environments.cache import EnvironmentCache, Kept
from conch_environments.locks import FileLock

MIB = 1024 * 1024


class Maker:
    """Makes environments of a file, and counts them."""

    def __init__(self, mib: int = 0, error: Exception | None = None) -> None:
        self.mib = mib
        self.error = error
        self.made = 0

    def __call__(self, folder: Path, lock: int) -> Mapping[str, str]:
        assert list(folder.iterdir()) == []
        self.made += 1
        (folder / "env").mkdir()
        (folder / "env" / "file").write_bytes(os.urandom(self.mib * MIB))
        if self.error is not None:
            raise self.error
        return {"version": "3.12.1"}


def keys(cache: EnvironmentCache) -> set[str]:
    """Keys of the environments; the directory holds nothing else."""
    names = {path.name for path in cache.directory.iterdir()}
    found = {name for name in names if not name.endswith(".lock")}
    assert names == found | {f"{key}.lock" for key in found}
    return found


def use(cache: EnvironmentCache, key: str, maker: Maker | None = None) -> Kept:
    return cache.find_or_make(key, maker or Maker(), f"environment {key}")


def test_it_is_made_once_and_kept(tmp_path: Path) -> None:
    cache, maker = EnvironmentCache(tmp_path / "a" / "b"), Maker()
    for _ in range(3):
        kept = use(cache, "x", maker)
        assert kept.folder == tmp_path / "a" / "b" / "x"
        assert kept.facts["version"] == "3.12.1"
        kept.release()
        kept.release()
    assert maker.made == 1
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700


def test_many_at_once_make_it_once(tmp_path: Path) -> None:
    cache, maker = EnvironmentCache(tmp_path), Maker()
    with ThreadPoolExecutor(8) as pool:
        for kept in pool.map(lambda _: use(cache, "x", maker), range(8)):
            kept.release()
    assert maker.made == 1


def test_a_waiting_load_uses_the_entry_of_another_maker(tmp_path: Path) -> None:
    """Even if the maker turns into a user between two tries."""
    cache, waits = EnvironmentCache(tmp_path), threading.Event()

    def stopped() -> bool:
        waits.set()
        return False

    making = FileLock.try_exclusive(tmp_path / "x.lock")
    assert making is not None
    with making, ThreadPoolExecutor(1) as pool:
        other = pool.submit(cache.find_or_make, "x", Maker(), "x", stopped)
        assert waits.wait(WAIT_S)
        (tmp_path / "x").mkdir()
        (tmp_path / "x" / "complete.json").write_text('{"version": "3.12.1"}')
        assert making.share()
        try:
            kept = other.result(WAIT_S)
        finally:
            making.close()
    assert kept.folder.name == "x" and kept.facts == {"version": "3.12.1"}
    kept.release()


def test_one_that_is_in_use_and_has_lost_its_record_is_made_beside_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The record was deleted by hand; no maker exists to wait for."""
    cache, maker = EnvironmentCache(tmp_path), Maker()
    used = [use(cache, "x", maker)]
    for count in (2, 3):
        (used[-1].folder / "complete.json").unlink()
        used.append(cache.find_or_make("x", maker, "env", stopping_after(WAIT_S)))
        assert used[-1].folder == tmp_path / f"x~{count}"
        assert maker.made == count
    assert f"env: the record of '{tmp_path / 'x'}' is gone, but it is in use; another one" in caplog.text
    for kept in used:
        assert (kept.folder / "env").is_dir()
        kept.release()
    use(cache, "x", maker).release()
    assert maker.made == 4
    assert keys(cache) == {"x", "x~3"}, "that of the other one was gone as well"


def stopping_after(seconds: float) -> Callable[[], bool]:
    end = time.monotonic() + seconds
    return lambda: time.monotonic() > end


def test_what_fails_is_not_kept(tmp_path: Path) -> None:
    cache, maker = EnvironmentCache(tmp_path), Maker(error=ValueError("no"))
    with pytest.raises(ValueError, match="no"):
        use(cache, "x", maker)
    assert keys(cache) == set()
    use(cache, "x").release()
    assert keys(cache) == {"x"}


PROCESS = """
import os, signal, sys
from pathlib import Path
from conch_environments.cache import EnvironmentCache

def make(folder, lock):
    (folder / "env").mkdir()
    with open(sys.argv[2], "a") as file:
        file.write("made\\n")
    print("making", flush=True)
    sys.stdin.readline()
    return {}

EnvironmentCache(Path(sys.argv[1])).find_or_make("x", make, "x")
assert (Path(sys.argv[1]) / "x" / "env").is_dir()
print("has it", flush=True)
sys.stdin.readline()
"""


def started(cache: Path, count: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", textwrap.dedent(PROCESS), str(cache), str(count)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment, text=True)


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def go_on(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


@pytest.mark.process
def test_processes_wait_for_one_another(tmp_path: Path) -> None:
    """A waiting process makes it anew if the maker is killed."""
    cache, count = tmp_path / "cache", tmp_path / "count"
    with started(cache, count) as first:
        assert line(first) == "making"
        with started(cache, count) as second, started(cache, count) as third:
            os.kill(first.pid, signal.SIGKILL)
            first.wait()
            making = second if any_of(second, third) else third
            other = third if making is second else second
            go_on(making)
            assert line(making) == "has it"
            assert line(other) == "has it"
            go_on(making)
            go_on(other)
    assert count.read_text() == "made\n" * 2
    assert (second.returncode, third.returncode) == (0, 0)
    assert keys(EnvironmentCache(cache)) == {"x"}


def any_of(first: subprocess.Popen[str], second: subprocess.Popen[str]) -> bool:
    """Waits until one of two makes it; True if it is the first."""
    import select

    assert first.stdout is not None
    assert second.stdout is not None
    ready, _, _ = select.select([first.stdout, second.stdout], [], [], WAIT_S)
    assert ready, "neither makes it"
    chosen = first if ready[0] is first.stdout else second
    assert line(chosen) == "making"
    return chosen is first


@pytest.mark.process
def test_what_a_crash_left_behind_is_removed_with_the_next(tmp_path: Path) -> None:
    cache, count = EnvironmentCache(tmp_path / "cache"), tmp_path / "count"
    with started(cache.directory, count) as process:
        assert line(process) == "making"
        process.kill()
    assert keys(cache) == {"x"}
    use(cache, "y").release()
    assert keys(cache) == {"y"}


@pytest.mark.process
def test_what_a_tool_still_works_on_is_left_alone(tmp_path: Path) -> None:
    """A running tool inherits the lock, so the entry is in use."""
    cache = EnvironmentCache(tmp_path)
    tools: list[subprocess.Popen[bytes]] = []

    def make(folder: Path, lock: int) -> Mapping[str, str]:
        tools.append(subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=(lock,)))
        return {}

    cache.find_or_make("x", make, "x").release()
    os.truncate(tmp_path / "x" / "complete.json", 0)  # as if it were incomplete
    use(cache, "y").release()
    assert keys(cache) == {"x", "y"}
    for tool in tools:
        with tool:
            assert tool.stdin is not None
            tool.stdin.close()
    use(cache, "z").release()
    assert keys(cache) == {"y", "z"}


def test_waiting_can_be_stopped(tmp_path: Path) -> None:
    cache = EnvironmentCache(tmp_path)
    making, go, stop = threading.Event(), threading.Event(), threading.Event()

    def make(folder: Path, lock: int) -> Mapping[str, str]:
        making.set()
        go.wait(WAIT_S)
        return {}

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(cache.find_or_make, "x", make, "x")
        assert making.wait(WAIT_S)
        polls: list[None] = []

        def stopped() -> bool:
            polls.append(None)
            return len(polls) == 3

        with pytest.raises(UnavailableError, match="stopped while another process made its environment"):
            cache.find_or_make("x", make, "x", stopped)
        go.set()
        first.result(WAIT_S).release()
    assert not stop.is_set()


def test_those_not_used_for_longest_go_first(tmp_path: Path) -> None:
    cache, maker = EnvironmentCache(tmp_path, limit_mb=3), Maker(mib=1)
    for number, key in enumerate("abc"):
        use(cache, key, maker).release()
        os.utime(tmp_path / key / "complete.json", ns=(number + 1, number + 1))
    use(cache, "a", maker).release()  # used again
    use(cache, "d", maker).release()
    assert keys(cache) == {"a", "c", "d"}
    assert maker.made == 4


def test_what_is_in_use_stays(tmp_path: Path) -> None:
    cache, maker = EnvironmentCache(tmp_path, limit_mb=1), Maker(mib=1)
    used = use(cache, "a", maker)
    os.utime(tmp_path / "a" / "complete.json", ns=(1, 1))
    last = use(cache, "b", maker)
    assert keys(cache) == {"a", "b"}
    used.release()
    use(cache, "c", maker).release()
    assert keys(cache) == {"b", "c"}
    assert (used.folder.exists(), last.folder.exists()) == (False, True)
    last.release()


def test_folders_in_which_nothing_may_be_written_are_removed_too(tmp_path: Path) -> None:
    def make(folder: Path, lock: int) -> Mapping[str, str]:
        (folder / "env").mkdir()
        (folder / "env" / "file").write_text("x")
        (folder / "env").chmod(0o555)
        return {}

    cache = EnvironmentCache(tmp_path, limit_mb=0)
    cache.find_or_make("x", make, "x").release()
    use(cache, "y").release()
    assert keys(cache) == {"y"}


@pytest.mark.parametrize("record", ["", "[]", '{"bytes": '])
def test_a_damaged_record_vouches_for_nothing(tmp_path: Path, record: str) -> None:
    cache, maker = EnvironmentCache(tmp_path), Maker()
    use(cache, "x", maker).release()
    (tmp_path / "x" / "complete.json").write_text(record)
    use(cache, "x", maker).release()
    assert maker.made == 2
    assert json.loads((tmp_path / "x" / "complete.json").read_text())["version"] == "3.12.1"


def test_a_cache_that_cannot_be_used_is_said_with_the_option(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UnavailableError, match=r"can't be used: .*environment-cache=DIR names another"):
        use(EnvironmentCache(tmp_path / "file" / "cache"), "x")


def test_where_it_is_and_how_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert EnvironmentCache.of({}) == EnvironmentCache(Path("/cache/conch/environments"))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", "/home/someone")
    assert EnvironmentCache.of({}).directory == Path("/home/someone/.cache/conch/environments")
    options = {"environment-cache": "here", "environment-cache-mb": "7"}
    assert EnvironmentCache.of(options) == EnvironmentCache(Path.cwd() / "here", 7)
    for key, value in (("environment-cache", ""), ("environment-cache-mb", "-1")):
        with pytest.raises(InvalidArgumentError, match=f"^--backend-config=python,{key} must "):
            EnvironmentCache.of({key: value})


def test_a_lock_that_is_removed_is_not_held(tmp_path: Path) -> None:
    """Loads make, release and prune it in turn; none gets a folder that is removed."""
    cache = EnvironmentCache(tmp_path, limit_mb=0)
    wrong: list[str] = []

    def run(key: str) -> None:
        for _ in range(30):
            kept = use(cache, key, Maker())
            if not (kept.folder / "env").is_dir():
                wrong.append(key)
            kept.release()

    threads = [threading.Thread(target=run, args=(key,)) for key in "aabbc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    eventually(lambda: keys(cache), "an environment")
