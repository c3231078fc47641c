"""Models in odd places: what is loaded, what the index shows, and that nothing else is harmed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from conch.core.errors import InternalError
from conch.core.model_control import IndexEntry

if TYPE_CHECKING:
    from tests.support.sites import Site

UNPOLLED = r"^failed to load '.*', failed to poll from model repository(: .*)?$"


def hide(monkeypatch: pytest.MonkeyPatch, *hidden: Path) -> None:
    """Makes directories unreadable, as root can read everything."""
    for name in ("scandir", "listdir"):
        real = getattr(os, name)

        def look(path: Any = ".", real: Any = real) -> Any:
            if Path(path) in hidden:
                raise PermissionError(13, "Permission denied", str(path))
            return real(path)

        monkeypatch.setattr(os, name, look)


@pytest.mark.parametrize("name", [".m", "..m", "...", "m.", "m m", "é", "-m", "x" * 200])
def test_names_of_directories(site: Site, name: str) -> None:
    site.model(name)
    agent = site.agent()
    agent.load(name, {})
    assert agent.index(False) == [IndexEntry(name, "1", "READY")]
    assert site.send(name).error() is None


def test_what_is_no_model_directory(site: Site) -> None:
    site.model("m")
    (site.repository / "file").write_text("x")
    (site.repository / "dangling").symlink_to(site.repository / "nowhere")
    (site.repository / "a\nb").mkdir()
    os.mkfifo(site.repository / "pipe")
    agent = site.agent()
    assert agent.index(False) == [IndexEntry("m")]
    for name in ("file", "dangling", "a\nb", "pipe"):
        with pytest.raises(InternalError, match=UNPOLLED.replace(".*", name)):
            agent.load(name, {})
    agent.load("m", {})
    assert agent.ready()


def test_a_link_to_itself_harms_nobody_else(site: Site) -> None:
    model = site.model("m")
    (model / "labels").symlink_to(model / "labels")
    (site.repository / "loop").symlink_to(site.repository / "loop")
    agent = site.agent()
    assert agent.index(False) == [IndexEntry("loop"), IndexEntry("m")]
    with pytest.raises(InternalError, match=UNPOLLED):
        agent.load("loop", {})
    assert "Too many levels of symbolic links" in agent.index(False)[0].reason
    agent.load("m", {})
    assert site.send("m").error() is None


def test_a_link_to_a_model_is_one_and_may_be_turned(site: Site, tmp_path: Path) -> None:
    for name, version in (("blue", 1), ("green", 2)):
        site.model(name, {version: "ok"}, repository=tmp_path / "elsewhere")
    link = site.repository / "m"
    link.symlink_to(tmp_path / "elsewhere" / "blue")
    agent = site.agent()
    agent.load("m", {})
    assert agent.index(False) == [IndexEntry("m", "1", "READY")]
    fresh = site.repository / "fresh"
    fresh.symlink_to(tmp_path / "elsewhere" / "green")
    fresh.replace(link)
    agent.load("m", {})
    assert list(site.serving("m")) == [2]
    agent.load("m", {})
    assert site.loads() == ["m:1", "m:2"]


def test_links_inside_a_model(site: Site, tmp_path: Path) -> None:
    elsewhere = site.model("store", {4: "ok"}, repository=tmp_path / "elsewhere")
    model = site.model("m", {}, site.config("version_policy { all { } }"))
    (model / "4").symlink_to(elsewhere / "4")
    (model / "5").symlink_to(elsewhere / "5")
    (model / "6").write_text("x")
    agent = site.agent()
    agent.load("m", {})
    assert list(site.serving("m")) == [4]


def test_a_config_that_is_a_directory(site: Site) -> None:
    model = site.model("m", config=None)
    (model / "config.pbtxt").mkdir()
    agent = site.agent()
    with pytest.raises(InternalError, match=UNPOLLED):
        agent.load("m", {})
    (line,) = agent.index(False)
    assert (line.name, line.state) == ("m", "UNAVAILABLE")
    assert "Is a directory" in line.reason


def test_a_model_that_can_not_be_read(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("m", "n", "other"):
        site.model(name)
    agent = site.agent()
    agent.load("n", {})
    with monkeypatch.context() as patch:
        hide(patch, site.repository / "m", site.repository / "n")
        for name in ("m", "n"):
            with pytest.raises(InternalError, match=UNPOLLED):
                agent.load(name, {})
        lines = {line.name: line for line in agent.index(False)}
        assert (lines["m"].state, "Permission denied" in lines["m"].reason) == ("UNAVAILABLE", True)
        assert (lines["n"].version, lines["n"].state) == ("1", "READY")
        assert lines["n"].reason.startswith("it goes on as it was, as its successor failed to load: ")
        assert site.send("n").error() is None
        agent.load("other", {})
    agent.load("m", {})
    agent.load("n", {})
    assert agent.ready()


def test_a_repository_that_can_not_be_read_any_more(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.model("m")
    second = tmp_path / "second"
    site.model("n", repository=second)
    agent = site.agent(repositories=(site.repository, second))
    agent.load("n", {})
    with monkeypatch.context() as patch:
        hide(patch, second)
        assert agent.index(False) == [IndexEntry("m")]
        with pytest.raises(InternalError, match=UNPOLLED):
            agent.load("n", {})
        agent.load("m", {})
        assert site.send("n").error() is None
    agent.load("n", {})
    assert site.loads() == ["n:1", "m:1"]


def test_the_second_of_two_repositories_is_taken_away(site: Site, tmp_path: Path) -> None:
    second = tmp_path / "second"
    for repository in (site.repository, second):
        site.model("m", repository=repository)
    agent = site.agent(repositories=(site.repository, second))
    twice = IndexEntry("m", "", "UNAVAILABLE", "model appears in two or more repositories")
    assert agent.index(False) == [twice]
    assert agent.index(True) == []
    with pytest.raises(InternalError, match=UNPOLLED):
        agent.load("m", {})
    shutil.rmtree(second / "m")
    agent.load("m", {})
    assert agent.index(True) == [IndexEntry("m", "1", "READY")]
    site.model("m", repository=second)
    assert agent.index(False) == [twice]
    with pytest.raises(InternalError, match=UNPOLLED):
        agent.load("m", {})
    assert site.send("m").error() is None


def test_a_named_config_comes_and_goes(site: Site) -> None:
    model = site.model("m")
    agent = site.agent(model_config_name="mine")
    agent.load("m", {})

    def batch() -> object:
        return site.serving("m")[1].spec.config["max_batch_size"]

    assert batch() == 0
    (model / "configs").mkdir()
    (model / "configs" / "mine.pbtxt").write_text(site.config("max_batch_size: 5"))
    (model / "configs" / "yours.pbtxt").write_text("nonsense")
    agent.load("m", {})
    assert batch() == 5
    (model / "configs" / "mine.pbtxt").unlink()
    agent.load("m", {})
    assert batch() == 0


def test_numbers_that_are_no_versions(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    model = site.model("m", {1: "ok", 2**63 - 1: "ok"}, site.config("version_policy { all { } }"))
    odd = ("0", "00", "02", "-1", "+1", "1.5", "1e3", "٣", "4x", str(2**63), "9" * 200)
    for name in odd:
        (model / name).mkdir()
    agent = site.agent()
    agent.load("m", {})
    assert list(site.serving("m")) == [1, 2**63 - 1]
    for name in odd:
        assert any(f"ignore version directory '{name}'" in line for line in caplog.messages), name
