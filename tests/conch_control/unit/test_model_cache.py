"""The directory of fetched models."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.support.profiles import scaled

from conch_stores.cache import Blob, ModelCache, Tree


def blob(name: str, size: int) -> Blob:
    return Blob(hashlib.sha256(name.encode()).hexdigest(), size)


def fetch(cache: ModelCache, tree: Tree, files: dict[str, Blob], missing: list[str]) -> None:
    for path in missing:
        partial = cache.partial(files[path])
        assert partial is not None
        with closing(partial):
            partial.append(b"x" * (files[path].size - partial.size))
    tree.finish({path: files[path] for path in missing})


def add(cache: ModelCache, name: str, files: dict[str, Blob]) -> Tree:
    tree = cache.tree(name)
    try:
        fetch(cache, tree, files, tree.begin([], files))
    except BaseException:
        tree.remove()
        raise
    return tree


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[ModelCache]:
    with closing(ModelCache(tmp_path / "cache")) as made:
        yield made


def test_nothing_is_made_before_it_is_needed(tmp_path: Path) -> None:
    with closing(ModelCache(tmp_path / "cache")):
        assert not (tmp_path / "cache").exists()


def test_what_is_served_can_not_be_written_by_accident(cache: ModelCache) -> None:
    tree = add(cache, "m", {"x": blob("x", 3)})
    assert (tree.directory / "x").stat().st_mode & 0o222 == 0
    assert (tree.directory / "x").stat().st_nlink == 2


def test_copies_where_links_can_not_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(source: object, target: object) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", link)
    with closing(ModelCache(tmp_path / "cache", budget=250)) as cache:
        tree = add(cache, "m", {"x": blob("x", 100)})
        assert (tree.directory / "x").read_bytes() == b"x" * 100
        other = add(cache, "n", {"x": blob("y", 100)})  # for which the originals have to go
        stored = [
            path for path in (tmp_path / "cache").rglob("*") if path.name == "x" or len(path.name) == 64
        ]
        assert sum(path.stat().st_size for path in stored) <= 250
        assert (tree.directory / "x").exists()
        assert (other.directory / "x").exists()
        with pytest.raises(OSError, match="may hold 250 bytes"):
            add(cache, "o", {"x": blob("z", 100)})


def test_only_one_may_go_on_with_a_content(cache: ModelCache) -> None:
    cache.open()
    wanted = blob("x", 4)
    first = cache.partial(wanted)
    assert first is not None
    first.append(b"12")
    assert cache.partial(wanted) is None
    first.close()
    second = cache.partial(wanted)
    assert second is not None
    assert second.size == 2
    second.append(b"34")
    assert second.md5() == hashlib.md5(b"1234").hexdigest()
    second.close()
    with pytest.raises(OSError, match="closed"):
        second.append(b"5")


def test_a_content_that_is_served_is_not_cut_off_by_who_still_checks_it(cache: ModelCache) -> None:
    files = {"x": blob("x", 4)}
    tree = cache.tree("m")
    tree.begin([], files)
    checking = cache.partial(files["x"])
    assert checking is not None
    checking.append(b"1234")
    tree.finish(files)
    with pytest.raises(FileNotFoundError):
        checking.restart()
    checking.close()
    assert (tree.directory / "x").read_bytes() == b"1234"


def test_a_content_that_is_there_is_not_fetched_again(cache: ModelCache) -> None:
    add(cache, "m", {"x": blob("x", 4)})
    assert cache.partial(blob("x", 4)) is None
    assert list((cache.directory / "partial").iterdir()) == []


def test_what_was_fetched_too_far_begins_anew(cache: ModelCache) -> None:
    cache.open()
    (cache.directory / "partial" / blob("x", 1).digest).write_bytes(b"too much")
    partial = cache.partial(blob("x", 1))
    assert partial is not None
    assert partial.size == 0
    partial.close()


def test_what_dead_servers_have_left_is_removed(tmp_path: Path) -> None:
    now = [1e9]
    with closing(ModelCache(tmp_path, now=lambda: now[0])) as living:
        tree = add(living, "m", {"x": blob("x", 1)})
        dead = tmp_path / "owners" / "1-dead"
        (dead / "0" / "n").mkdir(parents=True)
        (dead / "lock").touch()
        (dead / "0.wanted").write_text(f"{blob('y', 5).digest} 5\n")
        for name, age in (("old", 8 * 86400), ("young", 86400)):
            path = tmp_path / "partial" / blob(name, 9).digest
            path.write_bytes(b"part")
            os.utime(path, (now[0] - age, now[0] - age))
        with closing(ModelCache(tmp_path, now=lambda: now[0])) as other:
            other.open()
            assert not dead.exists()
            assert tree.directory.exists()
            assert [path.name for path in (tmp_path / "partial").iterdir()] == [blob("young", 9).digest]
        assert tree.directory.exists()
    assert list((tmp_path / "owners").iterdir()) == []


def test_small_contents_are_kept_as_long_as_there_is_room(tmp_path: Path) -> None:
    with closing(ModelCache(tmp_path, budget=10)) as cache:
        cache.open()
        cache.keep(blob("a", 4), b"aaaa")
        assert cache.find(blob("a", 4)) == b"aaaa"
        assert cache.find(blob("a", 5)) is None
        cache.keep(blob("b", 20), b"b" * 20)
        assert cache.find(blob("b", 20)) is None
        assert list((tmp_path / "partial").iterdir()) == []


def test_the_one_used_longest_ago_goes_first(tmp_path: Path) -> None:
    now = [0.0]

    def clock() -> float:
        now[0] += 1
        return now[0]

    with closing(ModelCache(tmp_path, budget=30, now=clock)) as cache:
        for name in "abc":
            add(cache, name, {"x": blob(name, 10)}).remove()
        add(cache, "a", {"x": blob("a", 10)}).remove()
        add(cache, "d", {"x": blob("d", 10)}).remove()
        assert [name for name in "abcd" if cache.has(blob(name, 10))] == ["a", "c", "d"]


class Sharing(RuleBasedStateMachine):
    """Two servers with one cache, models that come and go: the budget holds, and nothing in use is lost."""

    BUDGET = 40

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.caches = [self._new(), self._new()]
        self.trees: list[tuple[int, Tree, dict[str, Blob]]] = []
        self.begun: list[tuple[int, Tree, dict[str, Blob], list[str]]] = []

    def _new(self) -> ModelCache:
        return ModelCache(Path(self.directory.name), budget=self.BUDGET)

    @rule(who=st.integers(0, 1), names=st.sets(st.sampled_from("abcdef"), min_size=1, max_size=3))
    def begin(self, who: int, names: set[str]) -> None:
        files = {name: blob(name, 5 + ord(name) % 7) for name in names}
        tree = self.caches[who].tree("m")
        try:
            missing = tree.begin([], files)
        except OSError as error:
            assert error.errno == errno.ENOSPC
            tree.remove()
            held = [f for _, _, each in self.trees for f in each.values()]
            held += [f for _, _, each, _ in self.begun for f in each.values()]
            assert sum(each.size for each in {*held, *files.values()}) > self.BUDGET
            return
        self.begun.append((who, tree, files, missing))

    @precondition(lambda self: self.begun)
    @rule(data=st.data(), finish=st.booleans())
    def end(self, data: st.DataObject, finish: bool) -> None:
        who, tree, files, missing = self.begun.pop(data.draw(st.integers(0, len(self.begun) - 1)))
        cache = self.caches[who]
        if finish:
            missing_now = [path for path in missing if not cache.has(files[path])]
            for path in missing_now:
                partial = cache.partial(files[path])
                assert partial is not None
                with closing(partial):
                    partial.append(b"x" * (files[path].size - partial.size))
            tree.finish({path: files[path] for path in missing})
            self.trees.append((who, tree, files))
        else:
            for path in missing[:1]:
                partial = cache.partial(files[path])
                if partial is None:
                    assert cache.has(files[path])
                    continue
                with closing(partial):
                    partial.append(b"x" * min(2, files[path].size - partial.size))
            tree.remove()

    @precondition(lambda self: self.trees)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        self.trees.pop(data.draw(st.integers(0, len(self.trees) - 1)))[1].remove()

    @rule(who=st.integers(0, 1))
    def restart(self, who: int) -> None:
        self.caches[who].close()
        self.trees = [each for each in self.trees if each[0] != who]
        self.begun = [each for each in self.begun if each[0] != who]
        self.caches[who] = self._new()
        self.caches[who].open()

    @invariant()
    def the_budget_holds(self) -> None:
        root = Path(self.directory.name)
        stored = [*root.glob("blobs/*"), *root.glob("partial/*")]
        assert sum(path.stat().st_size for path in stored) <= self.BUDGET

    @invariant()
    def what_is_in_use_is_whole(self) -> None:
        for _, tree, files in self.trees:
            for path, each in files.items():
                assert (tree.directory / path).read_bytes() == b"x" * each.size

    def teardown(self) -> None:
        for cache in self.caches:
            cache.close()
        self.directory.cleanup()


Sharing.TestCase.settings = settings(max_examples=scaled(60), stateful_step_count=25, deadline=None)
TestSharing = Sharing.TestCase


def test_a_killed_owner_does_not_hold_the_lock(tmp_path: Path) -> None:
    with closing(ModelCache(tmp_path)) as cache:
        cache.open()
        descriptor = os.open(tmp_path / "lock", os.O_RDWR)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.close(descriptor)  # as the kernel does for who dies
        cache.keep(blob("a", 1), b"a")
        assert cache.has(blob("a", 1))


def test_a_short_write_is_continued(tmp_path: Path) -> None:
    cache = ModelCache(tmp_path, write=lambda file, data, offset: os.pwrite(file, data[:3], offset))
    cache.open()
    partial = cache.partial(Blob("digest", 10))
    assert partial is not None
    partial.append(b"0123456789")
    assert partial.md5() == hashlib.md5(b"0123456789").hexdigest()
    partial.close()
    cache.close()
