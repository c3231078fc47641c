"""The ModelControl service over real sockets, in front of an agent without models."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.support.agents import FakeAgent
from tests.support.certificates import Authority
from tests.support.control_ports import connected, served
from tests.support.servers import WAIT_S, eventually

from conch.core.errors import (
    CancelledError,
    ConchError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    OutOfRangeError,
    ResourceExhaustedError,
    UnauthenticatedError,
    UnavailableError,
    UnsupportedError,
)
from conch.protocol import model_control_pb2 as pb
from conch_control.remote_api.client import After, ModelControlClient, Update, WatchCall
from conch_control.remote_api.connection_options import (
    ClientTls,
    ControlPortOptions,
    ServerTls,
)
from conch_control.remote_api.messages import UnreachableError
from conch_control.remote_api.server import ControlPort
from conch_control.version_phase import Phase

SERVICE = "/conch.control.v1.ModelControl/"


@pytest.fixture
def agent() -> FakeAgent:
    return FakeAgent()


@pytest.fixture
def target(agent: FakeAgent) -> Iterator[str]:
    with served(agent) as (_, target):
        yield target


@pytest.fixture
def client(target: str) -> Iterator[ModelControlClient]:
    with connected(target) as client:
        yield client


@contextmanager
def watching(watch: WatchCall) -> Iterator[Iterator[Update]]:
    """The updates of a watch, which is cancelled in the end."""
    try:
        yield iter(watch)
    finally:
        watch.cancel()


def error_of(action: Callable[[], object]) -> ConchError:
    with pytest.raises(ConchError) as raised:
        action()
    return raised.value


def test_calls_whose_message_never_comes_are_no_errors(
    agent: FakeAgent, caplog: pytest.LogCaptureFixture
) -> None:
    never = threading.Event()
    with served(agent) as (_, target), grpc.insecure_channel(target) as channel:
        for method in ("Index", "Watch"):
            call = channel.stream_stream(SERVICE + method)(
                iter(lambda: never.wait(WAIT_S) and b"", None), timeout=WAIT_S
            )
            channel.unary_unary(SERVICE + "Index")(b"", timeout=WAIT_S)  # calls begin in order
            call.cancel()
        never.set()
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_the_methods(agent: FakeAgent, client: ModelControlClient) -> None:
    parameters: dict[str, Any] = {"config": "{}", "file:1/model.onnx": b"\0\xff", "b": True, "n": -1}
    client.load("m", parameters)
    assert agent.loads == [("m", parameters)]
    client.unload("m", True)
    assert agent.unloads == [("m", True)]
    assert client.models() == agent.models()
    assert client.describe("m") == agent.describe("m")
    client.set_label("m", "champion", 1)
    assert client.describe("m").status.labels == {"champion": 1} == agent.labels["m"]
    client.set_label("m", "champion", None)
    assert not agent.labels["m"]
    client.drain()
    assert agent.drains == 1


def test_large_files(agent: FakeAgent, client: ModelControlClient) -> None:
    content = bytes(20 << 20)
    client.load("m", {"file:1/model.onnx": content})
    assert agent.loads == [("m", {"file:1/model.onnx": content})]


@pytest.mark.parametrize(
    "error",
    [
        NotFoundError("no such model"),
        InvalidArgumentError("é and % and\nlines"),
        UnavailableError("explicit model load / unload is not allowed"),
        InternalError("it has failed"),
        UnsupportedError("not supported yet"),
        ResourceExhaustedError("full"),
        CancelledError("superseded"),
        OutOfRangeError("gone"),
    ],
)
def test_errors_of_the_agent(agent: FakeAgent, client: ModelControlClient, error: ConchError) -> None:
    agent.failures["m"] = lambda: type(error)(error.message)
    found = error_of(lambda: client.load("m", {}))
    assert (type(found), found.message) == (type(error), error.message)


def test_a_long_error(agent: FakeAgent, client: ModelControlClient) -> None:
    agent.failures["m"] = lambda: InvalidArgumentError("é" * 100_000)
    found = error_of(lambda: client.load("m", {}))
    assert isinstance(found, InvalidArgumentError)
    assert found.message.startswith("é" * 600) and found.message.endswith(" …")


def test_a_failure_of_the_agent(
    agent: FakeAgent, client: ModelControlClient, caplog: pytest.LogCaptureFixture
) -> None:
    agent.failures["m"] = lambda: ZeroDivisionError("oops")
    # A traceback in a record that pytest keeps would keep the call, and with it the server.
    with caplog.at_level(logging.CRITICAL, "conch_control.remote_api.server"):
        found = error_of(lambda: client.load("m", {}))
    assert (type(found), found.message) == (InternalError, "the request could not be answered")


@pytest.mark.parametrize("method", ["Load", "Watch"])
def test_malformed_messages(target: str, client: ModelControlClient, method: str) -> None:
    with grpc.insecure_channel(target) as channel, pytest.raises(grpc.RpcError) as raised:
        list(channel.unary_stream(SERVICE + method)(b"\xff", timeout=WAIT_S))
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert raised.value.details().startswith("the request message is malformed")
    assert client.models().models  # and goes on


def test_other_services(target: str) -> None:
    with grpc.insecure_channel(target) as channel, pytest.raises(grpc.RpcError) as raised:
        channel.unary_unary("/inference.GRPCInferenceService/ServerLive")(b"", timeout=WAIT_S)
    assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED


# --- who may call


def test_a_token(agent: FakeAgent) -> None:
    with served(agent, ControlPortOptions(port=0, token="pearl")) as (_, target):
        with connected(target, token="pearl") as client:
            client.load("m", {})
        for token, text in ((None, "no token"), ("shell", "wrong token"), ("pearl ", "wrong token")):
            with connected(target, token=token) as client:
                found = [
                    error_of(lambda: client.load("x", {})),
                    error_of(client.drain),
                    error_of(lambda: list(client.watch())),
                ]
                for error in found:
                    assert isinstance(error, UnauthenticatedError)
                    assert error.message.startswith(text)
    assert (agent.loads, agent.drains) == ([("m", {})], 0)


def test_nothing_is_read_from_a_caller_without_the_token(agent: FakeAgent) -> None:
    """A server that looked at its message would refuse it as malformed."""
    with served(agent, ControlPortOptions(port=0, token="pearl")) as (_, target):
        for metadata in ((), (("authorization", "Bearer pearl"),) * 2, (("authorization", "pearl"),)):
            with grpc.insecure_channel(target) as channel, pytest.raises(grpc.RpcError) as raised:
                channel.unary_unary(SERVICE + "Load")(b"\xff" * 2**20, timeout=WAIT_S, metadata=metadata)
            assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_only_holders_of_the_token_find_a_method_unknown(agent: FakeAgent) -> None:
    statuses = {}
    with served(agent, ControlPortOptions(port=0, token="pearl")) as (_, target):
        for token in ("pearl", "shell"):
            with grpc.insecure_channel(target) as channel, pytest.raises(grpc.RpcError) as raised:
                metadata = (("authorization", f"Bearer {token}"),)
                channel.unary_unary(SERVICE + "Nothing")(b"", timeout=WAIT_S, metadata=metadata)
            statuses[token] = raised.value.code()
    assert statuses == {"pearl": grpc.StatusCode.UNIMPLEMENTED, "shell": grpc.StatusCode.UNAUTHENTICATED}


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "192.0.2.1", "no.such.host.invalid", ""])
def test_a_port_for_everybody_is_refused(agent: FakeAgent, address: str) -> None:
    with pytest.raises(
        InvalidArgumentError, match="give --control-token-file or --access-policy, or --control-root-cert"
    ):
        ControlPort(agent, ControlPortOptions(address, 0))
    tls = ServerTls(b"", b"")
    with pytest.raises(InvalidArgumentError, match="would let anyone"):
        ControlPort(agent, ControlPortOptions(address, 0, tls))


@pytest.mark.parametrize("address", ["127.0.0.1", "127.1.2.3", "::1", "[::1]", "localhost"])
def test_this_machine_only_needs_no_token(address: str) -> None:
    ControlPortOptions(address, 0).check()


def test_everybody_with_a_token_or_a_certificate() -> None:
    ControlPortOptions("0.0.0.0", 0, token="pearl").check()
    ControlPortOptions("0.0.0.0", 0, ServerTls(b"", b"", b"")).check()


def test_a_unix_socket(agent: FakeAgent, tmp_path: Path) -> None:
    options = ControlPortOptions(f"unix:{tmp_path}/control.sock", 0)
    with served(agent, options) as (_, target), connected(target) as client:
        client.load("m", {})
    assert agent.loads == [("m", {})]


def test_tls(agent: FakeAgent, tmp_path: Path) -> None:
    ours, theirs = Authority(tmp_path / "ours"), Authority(tmp_path / "theirs")
    key, certificate = (file.read_bytes() for file in ours.issue("server"))
    with served(agent, ControlPortOptions(port=0, tls=ServerTls(key, certificate))) as (_, target):
        with connected(target, ClientTls(ours.root.read_bytes())) as client:
            client.load("m", {})
        with connected(target, ClientTls(ours.root.read_bytes(), server_name="elsewhere")) as client:
            assert isinstance(error_of(client.models), UnreachableError)
        for tls in (None, ClientTls(theirs.root.read_bytes()), ClientTls()):
            with connected(target, tls) as client:
                assert isinstance(error_of(client.models), UnreachableError)
    assert agent.loads == [("m", {})]


def test_mutual_tls(agent: FakeAgent, tmp_path: Path) -> None:
    ours, theirs = Authority(tmp_path / "ours"), Authority(tmp_path / "theirs")
    key, certificate = (file.read_bytes() for file in ours.issue("server"))
    root = ours.root.read_bytes()
    options = ControlPortOptions("0.0.0.0", 0, ServerTls(key, certificate, root))
    with served(agent, options) as (_, target):
        own, foreign = (
            ClientTls(root, private.read_bytes(), chain.read_bytes())
            for private, chain in (authority.issue("client") for authority in (ours, theirs))
        )
        with connected(target, own) as client:
            client.load("m", {})
        for tls in (ClientTls(root), foreign, None):
            with connected(target, tls) as client:
                assert isinstance(error_of(client.models), UnreachableError)
    assert agent.loads == [("m", {})]


def test_certificates_that_are_none(agent: FakeAgent) -> None:
    port = ControlPort(agent, ControlPortOptions(port=0, tls=ServerTls(b"no key", b"no certificate")))
    with pytest.raises(UnavailableError, match="can't be listened on"):
        port.start()


def test_a_port_that_is_taken(agent: FakeAgent, target: str) -> None:
    port = ControlPort(agent, ControlPortOptions(port=int(target.rpartition(":")[2])))
    with pytest.raises(UnavailableError, match="can't be listened on"):
        port.start()


# --- watching


def test_a_watch_from_now_on(agent: FakeAgent, client: ModelControlClient) -> None:
    agent.set("old", Phase.READY)
    with watching(client.watch()) as updates:
        assert next(updates) == Update(agent.events.epoch, 1, None, (), ())
        agent.set("m", Phase.LOADING, "because")
        update = next(updates)
        assert (update.epoch, update.revision) == (agent.events.epoch, 2)
        assert list(update.events) == agent.events.after(1)


def test_a_watch_of_the_whole_state(agent: FakeAgent, client: ModelControlClient) -> None:
    agent.set("m", Phase.READY)
    with watching(client.watch(whole_state=True)) as updates:
        assert next(updates) == Update(agent.events.epoch, 1, agent.models(), (), ())
        agent.set("m", Phase.DRAINING)
        assert [(event.revision, event.phase) for event in next(updates).events] == [(2, Phase.DRAINING)]
    with watching(client.watch(whole_state=True, models=["resting"])) as updates:
        state = next(updates).state
        assert state is not None and [model.name for model in state.models] == ["resting"]


def test_a_watch_resumes(agent: FakeAgent, client: ModelControlClient) -> None:
    for _ in range(5):
        agent.set("m", Phase.LOADING)
    for revision in range(6):
        with watching(client.watch(After(agent.events.epoch, revision))) as updates:
            assert next(updates).revision == revision
            agent.events.append("m", 1, Phase.READY)
            seen = [event.revision for event in next(updates).events]
            assert seen[0] == revision + 1


def test_a_watch_that_can_not_resume(client: ModelControlClient, agent: FakeAgent) -> None:
    for _ in range(150):
        agent.set("m", Phase.LOADING)
    epoch = agent.events.epoch
    found = error_of(lambda: list(client.watch(After(epoch, 49))))
    assert isinstance(found, OutOfRangeError)
    assert "the log has those from 51 to 150" in found.message
    assert isinstance(error_of(lambda: list(client.watch(After(epoch, 151)))), OutOfRangeError)
    found = error_of(lambda: list(client.watch(After("before", 100))))
    assert isinstance(found, OutOfRangeError)
    assert found.message.startswith(f"epoch 'before' is not that of this server, '{epoch}'")


def test_whole_state_must_be_true(target: str) -> None:
    with grpc.insecure_channel(target) as channel, pytest.raises(grpc.RpcError) as raised:
        request = pb.WatchRequest(whole_state=False).SerializeToString()
        list(channel.unary_stream(SERVICE + "Watch")(request, timeout=WAIT_S))
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_a_watch_of_one_model(agent: FakeAgent, client: ModelControlClient) -> None:
    with watching(client.watch(models=["m"])) as updates:
        next(updates)
        agent.set("other", Phase.READY)
        agent.set("m", Phase.READY)
        update = next(updates)
        assert ([event.model for event in update.events], update.revision) == (["m"], 2)


def test_progress_of_staging(agent: FakeAgent, client: ModelControlClient) -> None:
    agent.staging["m"] = (0, 100)
    with watching(client.watch(progress_ms=1)) as updates:
        next(updates)
        agent.set("m", Phase.STAGING)
        update = next(updates)
        assert [event.phase for event in update.events] == [Phase.STAGING]
        seen = list(update.progress)
        agent.staging["m"] = (60, 100)
        while not seen or seen[-1].versions[0].done_bytes != 60:
            seen += next(updates).progress
        agent.staging["m"] = (60, 100)  # nothing new, nothing told
        agent.set("m", Phase.LOADING)
        update = next(updates)
        assert ([event.phase for event in update.events], update.progress) == ([Phase.LOADING], ())
    assert [model.name for model in seen] == ["m"] * len(seen)


def test_a_watch_tells_when_the_server_drains(agent: FakeAgent, client: ModelControlClient) -> None:
    with watching(client.watch(models=["m"])) as updates:
        assert not next(updates).draining
        client.drain()
        assert next(updates) == Update(agent.events.epoch, 0, None, (), (), draining=True)
    with watching(client.watch()) as updates:
        assert next(updates).draining
    assert client.models().draining


def test_watches_are_bounded_and_lock_nobody_out(agent: FakeAgent) -> None:
    with served(agent, watches=2) as (_, target), connected(target) as client:
        with watching(client.watch()) as first, watching(client.watch()) as second:
            next(first)
            next(second)
            found = error_of(lambda: list(client.watch()))
            assert isinstance(found, ResourceExhaustedError)
            assert found.message == "2 callers watch already; try again when one of them has ended"
            client.load("m", {})
        # Their places are free again when they have gone.
        eventually(lambda: watches(client), "a place is free")


def watches(client: ModelControlClient) -> bool:
    with suppress(ResourceExhaustedError), watching(client.watch()) as updates:
        return bool(next(updates).epoch)
    return False


def test_watches_that_are_dropped(agent: FakeAgent) -> None:
    """However many come and go, whether they say so or not, none of their places is lost."""
    with served(agent, watches=2) as (_, target), connected(target) as client:
        for number in range(20):
            with connected(target) as other:

                def watched(other: ModelControlClient = other) -> Iterator[Update] | None:
                    updates = iter(other.watch())
                    with suppress(ResourceExhaustedError):
                        next(updates)
                        return updates
                    return None

                updates = eventually(watched, "a place is free")
                if number % 2:
                    updates.close()  # else its connection is closed
        assert eventually(lambda: watches(client), "a place is free")


def test_loads_are_bounded_and_lock_nobody_out(agent: FakeAgent) -> None:
    agent.release.clear()
    with served(agent, loads=1) as (_, target), connected(target) as client:
        thread = threading.Thread(target=client.load, args=("m", {}))
        thread.start()
        assert agent.loading.wait(WAIT_S)
        found = error_of(lambda: client.load("other", {}))
        assert isinstance(found, ResourceExhaustedError)
        assert found.message == "1 loads go on already; try again when one of them has ended"
        assert client.models().models
        agent.release.set()
        thread.join(WAIT_S)
        client.load("other", {})


def test_a_load_whose_caller_has_gone_goes_on(agent: FakeAgent, target: str) -> None:
    agent.release.clear()
    with grpc.insecure_channel(target) as channel:
        request = pb.LoadRequest(model="m").SerializeToString()
        call = channel.unary_unary(SERVICE + "Load").future(request, timeout=WAIT_S)
        assert agent.loading.wait(WAIT_S)
        call.cancel()
    agent.release.set()
    with connected(target) as client:
        eventually(lambda: client.describe("m").status.versions[0].phase is Phase.READY, "it is loaded")


# --- stopping


def test_stopping_ends_watches(agent: FakeAgent) -> None:
    with served(agent) as (port, target), connected(target) as client:
        watches = [iter(client.watch()) for _ in range(5)]
        for updates in watches:
            next(updates)
        assert port.stop(WAIT_S)  # does not take that long
        for updates in watches:
            found = error_of(lambda: next(updates))  # noqa: B023
            assert isinstance(found, UnavailableError) and not isinstance(found, UnreachableError)
            assert found.message == "Server exiting"
        assert isinstance(error_of(client.models), UnreachableError)


def test_a_watch_tells_everything_before_the_log_is_closed(
    agent: FakeAgent, client: ModelControlClient
) -> None:
    with watching(client.watch()) as updates:
        next(updates)
        agent.set("m", Phase.UNLOADED)
        agent.events.close()
        assert [event.model for event in next(updates).events] == ["m"]
        assert error_of(lambda: next(updates)).message == "Server exiting"


def test_a_load_that_outlasts_the_stop(agent: FakeAgent) -> None:
    agent.release.clear()
    port = ControlPort(agent, ControlPortOptions(port=0))
    with connected(f"127.0.0.1:{port.start()}") as client:
        errors: list[ConchError] = []
        thread = threading.Thread(target=lambda: errors.append(error_of(lambda: client.load("m", {}))))
        thread.start()
        assert agent.loading.wait(WAIT_S)
        assert not port.stop(0.0)
        thread.join(WAIT_S)
        assert len(errors) == 1 and isinstance(errors[0], CancelledError | UnreachableError)
    agent.release.set()
