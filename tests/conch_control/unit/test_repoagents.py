"""Repository agents: which hooks are called when, redirection, and the agent that compares checksums."""

from __future__ import annotations

import hashlib
import re
import shutil
import tempfile
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.sites import WAIT_S, Site

from conch.core.errors import ConchError, InternalError, InvalidArgumentError, UnsupportedError
from conch.protocol.model_config_pb2 import ModelConfig
from conch_control import repoagents
from conch_control.config.parse import parse_config
from conch_control.control_options import ControlOptions
from conch_control.lifecycle.model_definition import PollError, read_definition
from conch_control.repoagents import AgentChain, Checksum, ModelContext, RepositoryHook, find_hook, make_chain

CALLS: list[str] = []
"""Hooks that were called, in order: cleared for every test."""


@pytest.fixture(autouse=True)
def no_calls() -> None:
    CALLS.clear()


class Recorder(RepositoryHook):
    """An agent as another package may bring it: its parameters say where it fails, and where it redirects."""

    def load(self, directory: Path) -> Path:
        self._called("load")
        target = self.context.parameters.get("to")
        if target is None:
            return directory
        if self.context.parameters.get("copy"):
            shutil.copytree(directory, target)
        return Path(target)

    def load_complete(self) -> None:
        self._called("load_complete")

    def load_failed(self) -> None:
        self._called("load_failed")

    def unload(self) -> None:
        self._called("unload")

    def unload_complete(self) -> None:
        self._called("unload_complete")
        if self.context.parameters.get("copy"):
            shutil.rmtree(self.context.parameters["to"])

    def _called(self, hook: str) -> None:
        CALLS.append(f"{self.context.parameters['id']}:{hook}")
        if self.context.parameters.get("fails") == hook:
            raise ValueError(f"told to fail in {hook}")


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Installs the agent, as another package would."""
    entries = EntryPoints(
        [
            EntryPoint("recorder", f"{__name__}:Recorder", repoagents.GROUP),
            EntryPoint("lost", "no_such_package:Hook", repoagents.GROUP),
            EntryPoint("checksum", f"{__name__}:Recorder", repoagents.GROUP),
        ]
    )
    monkeypatch.setattr(repoagents, "entry_points", entries.select)


def agents(*parameters: dict[str, str], name: str = "recorder") -> str:
    """The part of a config that names agents."""

    def text(given: dict[str, str]) -> str:
        return " ".join(f'parameters {{ key: "{key}" value: "{value}" }}' for key, value in given.items())

    each = "\n".join(f'agents {{ name: "{name}" {text(given)} }}' for given in parameters)
    return f"model_repository_agents {{ {each} }}"


def chain_of(*parameters: dict[str, str]) -> AgentChain:
    return make_chain(parse_config(agents(*parameters), "c"), "m", lambda name: Recorder)


def numbered(hook: str, *numbers: int) -> list[str]:
    return [f"{number}:{hook}" for number in numbers]


@given(
    st.integers(0, 4),
    st.lists(st.sampled_from(["load_complete", "load_failed", "unload", "unload_complete"]), max_size=8),
    st.integers(-1, 3),
)
def test_every_hook_is_called_in_its_order_and_once(count: int, steps: list[str], fails: int) -> None:
    CALLS.clear()
    chain = chain_of(*({"id": str(n), **({"fails": "load"} if n == fails else {})} for n in range(count)))
    expected = numbered("load", *range(count))
    state = "loaded"
    try:
        chain.load(Path("/"))
    except ConchError as error:
        assert error.message == "told to fail in load"
        expected = numbered("load", *range(fails + 1)) + numbered("load_failed", *range(fails - 1, -1, -1))
        state = "over"
    else:
        assert not 0 <= fails < count
    up, down = range(count), range(count - 1, -1, -1)
    for step in steps:
        getattr(chain, step)()
        if step in ("load_complete", "load_failed"):
            if state == "loaded":
                expected += numbered(step, *down)
                state = "serves" if step == "load_complete" else "over"
        else:
            if state == "serves":
                expected += numbered("unload", *up)
                state = "leaving"
            if state == "leaving" and step == "unload_complete":
                expected += numbered("unload_complete", *down)
                state = "over"
    assert expected == CALLS


@pytest.mark.parametrize("hook", ["load_complete", "load_failed", "unload", "unload_complete"])
def test_what_fails_later_is_logged_and_keeps_no_one_from_hearing(
    hook: str, caplog: pytest.LogCaptureFixture
) -> None:
    chain = chain_of({"id": "0"}, {"id": "1", "fails": hook}, {"id": "2"})
    chain.load(Path("/"))
    (chain.load_failed if hook == "load_failed" else chain.load_complete)()
    chain.unload_complete()
    assert [call for call in CALLS if call.endswith(f":{hook}")] == numbered(
        hook, *((0, 1, 2) if hook == "unload" else (2, 1, 0))
    )
    assert f"repository agent 'recorder': {hook} failed for model 'm'" in caplog.messages


def test_agents_see_the_directory_as_those_before_them_left_it(tmp_path: Path) -> None:
    chain = chain_of({"id": "0", "to": str(tmp_path)}, {"id": "1"})
    assert chain.load(Path("/")) == tmp_path
    bad = chain_of({"id": "0", "to": str(tmp_path / "nowhere")})
    with pytest.raises(
        InternalError, match=r"'recorder' has model 'm' loaded from '.*nowhere', which is not"
    ):
        bad.load(Path("/"))


def test_what_an_agent_is_told() -> None:
    seen: list[ModelContext] = []

    def make(context: ModelContext) -> RepositoryHook:
        seen.append(context)
        return RepositoryHook(context)

    config = parse_config("max_batch_size: 3 " + agents({"a": "1", "b": "2"}), "c")
    chain = make_chain(config, "m", lambda name: make)
    assert chain
    assert chain.load(Path("/")) == Path("/")
    chain.load_complete()
    chain.unload_complete()
    (context,) = seen
    assert (context.model, context.parameters) == ("m", {"a": "1", "b": "2"})
    assert context.config["max_batch_size"] == 3
    assert not make_chain(ModelConfig(), "m")


def test_finding_agents(recorder: None) -> None:
    assert find_hook("recorder") is Recorder
    assert find_hook("checksum") is Checksum, "nobody takes its place"
    with pytest.raises(InvalidArgumentError) as unknown:
        find_hook("nope")
    assert unknown.value.message == (
        "unable to find repository agent 'nope'; there are: checksum, lost, recorder"
    )
    with pytest.raises(InvalidArgumentError, match="'lost' can't be imported: No module named 'no_such_pack"):
        find_hook("lost")


def test_a_model_and_its_agents(site: Site, recorder: None) -> None:
    site.model("m", config=site.config(agents({"id": "0"}, {"id": "1"})))
    agent = site.agent()
    loaded = [*numbered("load", 0, 1), *numbered("load_complete", 1, 0)]
    unloaded = [*numbered("unload", 0, 1), *numbered("unload_complete", 1, 0)]
    agent.load("m", {})
    assert loaded == CALLS
    agent.load("m", {})
    assert loaded == CALLS, "nothing has changed"
    CALLS.clear()
    site.model("m", {2: "ok"}, config=None)
    agent.load("m", {})
    assert site.serving("m").keys() == {2}
    agent.unload("m", False)
    assert agent.close(WAIT_S)
    # The old one leaves in the background, beside what happens to the new one.
    assert sorted(CALLS) == sorted([*loaded, *unloaded, *unloaded])
    assert CALLS[:2] == loaded[:2]


def test_a_model_is_loaded_from_where_its_agents_have_it(site: Site, recorder: None, tmp_path: Path) -> None:
    target = tmp_path / "made"
    site.model("m", config=site.config(agents({"id": "0", "to": str(target), "copy": "yes"})))
    agent = site.agent()
    agent.load("m", {})
    assert site.serving("m")[1].spec.directory == target
    assert site.send("m").error() is None
    agent.unload("m", False)
    assert agent.close(WAIT_S)
    assert not target.exists()


def test_the_config_is_that_of_the_new_directory_and_the_agents_are_those_of_the_old(
    site: Site, recorder: None, tmp_path: Path
) -> None:
    target = site.model("m", config=site.config("max_batch_size: 7"), repository=tmp_path / "other")
    site.model("m", {}, config=agents({"id": "0", "to": str(target)}))
    agent = site.agent()
    agent.load("m", {})
    assert site.serving("m")[1].spec.max_batch_size == 7
    agent.unload("m", False)
    assert agent.close(WAIT_S)
    assert CALLS == ["0:load", "0:load_complete", "0:unload", "0:unload_complete"]


@pytest.mark.parametrize(
    ("behaviour", "parameters", "calls"),
    [
        ("ok", {"fails": "load"}, ["0:load"]),
        ("crash boom", {}, ["0:load", "0:load_failed"]),
        ("ok", {"to": "/nowhere"}, ["0:load"]),
    ],
)
def test_loads_that_fail(
    site: Site, recorder: None, behaviour: str, parameters: dict[str, str], calls: list[str]
) -> None:
    site.model("m")
    agent = site.agent()
    agent.load("m", {})
    site.model("m", {1: behaviour}, site.config(agents({"id": "0", **parameters})))
    with pytest.raises(ConchError):
        agent.load("m", {})
    assert calls == CALLS
    assert site.send("m").error() is None, "the old one serves"


def test_a_broken_config_where_an_agent_has_it(recorder: None, site: Site, tmp_path: Path) -> None:
    target = site.model("m", config="max_batch: 1", repository=tmp_path / "other")
    directory = site.model("m", config=agents({"id": "0", "to": str(target)}))
    with pytest.raises(PollError, match="failed to poll"):
        read_definition("m", directory, ControlOptions(repositories=()))
    assert CALLS == ["0:load", "0:load_failed"]


def test_an_override_names_its_own_agents(site: Site, recorder: None) -> None:
    site.model("m", config=site.config(agents({"id": "0"})))
    agent = site.agent()
    override = (
        '{"backend": "echo", "input": [{"name": "X", "data_type": "TYPE_UINT8", "dims": [1]}],'
        '"output": [{"name": "X", "data_type": "TYPE_UINT8", "dims": [1]}],'
        '"model_repository_agents": {"agents": [{"name": "recorder", "parameters": {"id": "7"}}]}}'
    )
    agent.load("m", {"config": override})
    assert CALLS == ["7:load", "7:load_complete"]


def test_the_agent_of_the_documentation(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = Path(__file__).parents[3] / "docs" / "operations.md"
    (code,) = re.findall(r"```python\n(.*?)```", document.read_text(), re.DOTALL)
    namespace: dict[str, Any] = {}
    exec(code, namespace)
    monkeypatch.setattr(repoagents, "BUILT_IN", {"unpack": namespace["Unpack"]})
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    inside = site.model("m", repository=tmp_path / "inside")
    directory = site.model("m", {}, agents({"archive": "model.zip"}, name="unpack"))
    shutil.make_archive(str(directory / "model"), "zip", inside)
    with ZipFile(directory / "model.zip", "a") as archive:
        archive.writestr("../outside", "")
    agent = site.agent()
    agent.load("m", {})
    assert site.send("m").error() is None
    assert len(list(tmp_path.glob("unpack-*"))) == 1
    (outside,) = tmp_path.rglob("outside")
    assert outside.parent in tmp_path.glob("unpack-*")
    (directory / "model.zip").write_bytes(b"")
    with pytest.raises(InternalError, match="failed to poll"):
        agent.load("m", {})
    assert site.send("m").error() is None, "the old one serves"
    agent.unload("m", False)
    assert agent.close(WAIT_S)
    assert list(tmp_path.glob("unpack-*")) == []


# The checksum agent.

CONTENT = b"weights\n" * 100_000
MD5 = hashlib.md5(CONTENT).hexdigest()
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def files(tmp_path: Path) -> Path:
    directory = tmp_path / "m"
    (directory / "1").mkdir(parents=True)
    (directory / "1" / "weights").write_bytes(CONTENT)
    (tmp_path / "secret").write_bytes(CONTENT)
    return directory


def check(directory: Path, **parameters: str) -> Path:
    return Checksum(ModelContext("m", {}, parameters)).load(directory)


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"MD5:1/weights": MD5},
        {"md5:1/weights": MD5.upper()},
        {"SHA256:1/weights": SHA256, "MD5:1/../1/weights": MD5},
    ],
)
def test_files_that_are_what_they_should_be(files: Path, parameters: dict[str, str]) -> None:
    assert check(files, **parameters) == files


@pytest.mark.parametrize(
    ("key", "expected", "kind", "message"),
    [
        (
            "MD5:1/weights",
            "d726",
            InvalidArgumentError,
            f"Mismatched MD5 hash for file 1/weights, expect: d726, got: {MD5}",
        ),
        (
            "sha256:1/weights",
            MD5,
            InvalidArgumentError,
            f"Mismatched SHA256 hash for file 1/weights, expect: {MD5}, got: {SHA256}",
        ),
        ("SHA512:1/weights", "0", UnsupportedError, "Unsupported checksum algorithm: SHA512"),
        (":1/weights", "0", UnsupportedError, "Unsupported checksum algorithm: "),
        ("1/weights", MD5, InvalidArgumentError, "failed to parse key: 1/weights"),
        (
            "MD5:1/nope",
            MD5,
            InvalidArgumentError,
            "failed to open text file for read 1/nope: No such file or directory",
        ),
        ("MD5:1", MD5, InvalidArgumentError, "failed to open text file for read 1: Is a directory"),
        (
            "MD5:../secret",
            MD5,
            InvalidArgumentError,
            "failed to open text file for read ../secret: the file must be in the model's directory",
        ),
        ("MD5:1\0", MD5, InvalidArgumentError, "failed to open text file for read 1\0: embedded null byte"),
    ],
)
def test_files_that_are_not(
    files: Path, key: str, expected: str, kind: type[ConchError], message: str
) -> None:
    with pytest.raises(kind) as raised:
        check(files, **{key: expected})
    assert raised.value.message == message


def test_a_model_whose_checksum_does_not_match(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    digest = hashlib.sha256(b"ok").hexdigest()
    site.model("m", config=site.config(agents({"SHA256:1/model.echo": digest}, name="checksum")))
    agent = site.agent()
    agent.load("m", {})
    site.model("m", {1: "slow"}, config=None)
    with pytest.raises(InternalError) as raised:
        agent.load("m", {})
    assert raised.value.message.startswith(
        "failed to load 'm', failed to poll from model repository: Mismatched SHA256 hash for file "
    )
    assert f"Mismatched SHA256 hash for file 1/model.echo, expect: {digest}, got: " in caplog.text
    assert site.send("m").error() is None, "the old one serves"
