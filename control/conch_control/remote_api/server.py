"""The control port: a gRPC server separate from the data port, and the handlers of the ModelControl service.

Threads: gRPC runs each call on a pool thread, `conch-control-port`. Locks: `_changed` of `ModelControl`
guards the count of running calls.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message

from conch.access.access_guard import Access, AccessGuard
from conch.access.principals import ANY, EVERY_MODEL
from conch.core.errors import (
    CancelledError,
    ConchError,
    InternalError,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnavailableError,
    without_traceback,
)
from conch.core.process_setup import SMALL_PORT_SHARES, most_descriptors
from conch.protocol import model_control_pb2 as pb
from conch_control.agent_api import AgentApi, is_transient
from conch_control.remote_api.connection_options import ControlPortOptions, ServerTls, is_loopback
from conch_control.remote_api.messages import (
    abort,
    description_message,
    index_message,
    load_parameters,
    managed_by_of,
    managed_report_message,
    rollout_message,
)
from conch_control.remote_api.port_access import CallAccess, ContextPeer, control_guard
from conch_control.remote_api.watch_stream import STOPPED, Watch

log = logging.getLogger(__name__)

SERVICE = "conch.control.v1.ModelControl"

MOST_WATCHES = 64
MOST_LOADS = 64
QUICK_THREADS = 8
"""Threads reserved for short calls, so that watches and loads never block operators."""


class ConcurrencyLimit:
    """Limits concurrent calls of one kind; a principal has at most half of the slots."""

    def __init__(self, most: int, what: str) -> None:
        self._most = most
        self._what = what
        self._lock = threading.Lock()
        self._taken: Counter[str] = Counter()

    @contextmanager
    def acquire(self, principal: str) -> Iterator[None]:
        """Occupies one slot; `principal` is empty without an access policy.

        Raises:
            ResourceExhaustedError: All slots are taken, or all that the principal may have.
        """
        with self._lock:
            taken, own = self._taken.total(), self._taken[principal]
            if taken >= self._most:
                raise self._refusal(taken, "")
            if principal and own >= max(self._most // 2, 1):
                raise self._refusal(own, f" for principal '{principal}'")
            self._taken[principal] += 1
        try:
            yield
        finally:
            with self._lock:
                self._taken[principal] -= 1
                if not self._taken[principal]:
                    del self._taken[principal]

    def _refusal(self, taken: int, whose: str) -> ResourceExhaustedError:
        return ResourceExhaustedError(
            f"{taken} {self._what}{whose} already; try again when one of them has ended"
        )


class ModelControl:
    """Implements the service with an agent."""

    def __init__(
        self, agent: AgentApi, guard: AccessGuard, watches: int = MOST_WATCHES, loads: int = MOST_LOADS
    ) -> None:
        self._agent = agent
        self._guard = guard
        self._watches = ConcurrencyLimit(watches, "callers watch")
        self._loads = ConcurrencyLimit(loads, "loads go on")
        self._calls = ConcurrencyLimit(watches + loads + QUICK_THREADS, "calls go on")  # one for each thread
        self._refusing = False
        self._stopping = False
        self._running = 0
        self._changed = threading.Condition()

    def handlers(self) -> Any:
        """The `grpc.GenericRpcHandler` of the service."""
        unary: dict[str, tuple[Any, Callable[[Any, CallAccess], Message]]] = {
            "Load": (pb.LoadRequest, self._load),
            "Unload": (pb.UnloadRequest, self._unload),
            "Index": (pb.IndexRequest, self._index),
            "Describe": (pb.DescribeRequest, self._describe),
            "SetLabel": (pb.SetLabelRequest, self._set_label),
            "StartRollout": (pb.StartRolloutRequest, self._start_rollout),
            "UpdateRollout": (pb.UpdateRolloutRequest, self._update_rollout),
            "GetRollout": (pb.GetRolloutRequest, self._get_rollout),
            "ListRollouts": (pb.ListRolloutsRequest, self._list_rollouts),
            "Drain": (pb.DrainRequest, self._drain),
        }
        # To grpcio all requests are streams, which it does not receive before they are read: a caller without
        # credentials could have it receive messages of any size.
        methods = {
            name: grpc.stream_unary_rpc_method_handler(self._unary_handler(name, kind, answer))
            for name, (kind, answer) in unary.items()
        }
        methods["Watch"] = grpc.stream_stream_rpc_method_handler(self._watch)
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    def refuse_changes(self) -> None:
        """Refuses loads, unloads, labels, changes of rollouts and drains from now on."""
        self._refusing = True

    def stopping(self) -> None:
        """Ends all watches."""
        self._stopping = True
        self._agent.events.wake()

    def wait_idle(self, timeout_s: float) -> bool:
        """Waits until no call runs, not even a cancelled one; returns False on timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._running, timeout_s)

    @contextmanager
    def _tracked(self) -> Iterator[None]:
        with self._changed:
            self._running += 1
        try:
            yield
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def _check_changes(self) -> None:
        if self._refusing:
            raise UnavailableError(STOPPED)

    def _load(self, request: pb.LoadRequest, caller: CallAccess) -> pb.LoadResponse:
        self._check_changes()
        with caller.changing(request.model), self._loads.acquire(caller.principal):
            self._agent.load(request.model, load_parameters(request))
        return pb.LoadResponse()

    def _unload(self, request: pb.UnloadRequest, caller: CallAccess) -> pb.UnloadResponse:
        self._check_changes()
        with caller.changing(request.model):
            self._agent.unload(request.model, request.unload_dependents)
        return pb.UnloadResponse()

    def _set_label(self, request: pb.SetLabelRequest, caller: CallAccess) -> pb.SetLabelResponse:
        self._check_changes()
        version = request.version if request.HasField("version") else None
        with caller.changing(request.model):
            self._agent.set_label(request.model, request.label, version)
        return pb.SetLabelResponse()

    def _start_rollout(self, request: pb.StartRolloutRequest, caller: CallAccess) -> pb.StartRolloutResponse:
        self._check_changes()
        with caller.changing(request.model):
            try:
                declaration = json.loads(request.declaration_json) if request.declaration_json else {}
            except (ValueError, RecursionError) as error:
                raise InvalidArgumentError(f"declaration_json is not JSON: {error}") from None
            if request.HasField("managed_by"):
                managed_by = managed_by_of(request.managed_by)
                return managed_report_message(
                    self._agent.manage_rollout(request.model, declaration, managed_by)
                )
            report = self._agent.start_rollout(request.model, declaration, request.again)
        return pb.StartRolloutResponse(rollout=rollout_message(report))

    def _update_rollout(
        self, request: pb.UpdateRolloutRequest, caller: CallAccess
    ) -> pb.UpdateRolloutResponse:
        self._check_changes()
        weight = request.weight if request.HasField("weight") else None
        with caller.changing(request.model):
            report = self._agent.update_rollout(request.model, request.action, weight)
        return pb.UpdateRolloutResponse(rollout=rollout_message(report))

    def _get_rollout(self, request: pb.GetRolloutRequest, caller: CallAccess) -> pb.GetRolloutResponse:
        caller.check(request.model)
        return pb.GetRolloutResponse(rollout=rollout_message(self._agent.rollout(request.model)))

    def _list_rollouts(self, request: pb.ListRolloutsRequest, caller: CallAccess) -> pb.ListRolloutsResponse:
        shown = [each for each in self._agent.rollouts() if caller.allows(each.model)]
        return pb.ListRolloutsResponse(rollouts=map(rollout_message, shown))

    def _index(self, request: pb.IndexRequest, caller: CallAccess) -> pb.IndexResponse:
        index = self._agent.models()
        shown = replace(index, models=tuple(model for model in index.models if caller.allows(model.name)))
        return pb.IndexResponse(index=index_message(shown))

    def _describe(self, request: pb.DescribeRequest, caller: CallAccess) -> pb.DescribeResponse:
        caller.check(request.model)
        return pb.DescribeResponse(description=description_message(self._agent.describe(request.model)))

    def _drain(self, request: pb.DrainRequest, caller: CallAccess) -> pb.DrainResponse:
        self._check_changes()
        with caller.changing(EVERY_MODEL):
            self._agent.drain()
        return pb.DrainResponse()

    @contextmanager
    def _admitted(
        self, context: Any, name: str, messages: Iterator[bytes]
    ) -> Iterator[tuple[CallAccess, bytes]]:
        """Admits a call, and receives its message only then; raises ConchError."""
        with self._tracked():
            caller = CallAccess(self._guard, context, name)
            with self._calls.acquire(caller.principal):
                try:
                    data = next(messages, None)
                except grpc.RpcError:
                    raise CancelledError("the client has cancelled the call") from None
                if data is None:
                    raise InvalidArgumentError("the method takes exactly one request message, none was sent")
                caller.received(len(data))
                yield caller, data

    def _watch(self, messages: Iterator[bytes], context: Any) -> Iterator[bytes]:
        gone = threading.Event()

        def on_end() -> None:
            gone.set()
            self._agent.events.wake()

        if not context.add_callback(on_end):
            return
        try:
            with (
                self._admitted(context, "Watch", messages) as (caller, data),
                self._watches.acquire(caller.principal),
            ):
                request = pb.WatchRequest.FromString(data)

                def allows(model: str) -> bool:
                    caller.renew()  # the policy may have changed since the last message
                    return caller.allows(model)

                for message in Watch(
                    self._agent, request, lambda: self._stopping or gone.is_set(), allows=allows
                ):
                    caller.renew()
                    yield message.SerializeToString()
        except ConchError as error:
            abort(context, error)
        except DecodeError as error:
            abort(context, _malformed(error))
        except Exception:  # boundary: the top of a call
            log.exception("a watch has failed")
            abort(context, InternalError(_UNANSWERED))

    def _unary_handler(
        self, name: str, kind: Any, answer: Callable[[Any, CallAccess], Message]
    ) -> Callable[[Iterator[bytes], Any], bytes]:
        def handle(messages: Iterator[bytes], context: Any) -> bytes:
            error: ConchError
            transient = False
            try:
                with self._admitted(context, name, messages) as (caller, data):
                    return answer(kind.FromString(data), caller).SerializeToString()
            except ConchError as raised:
                transient = is_transient(raised)
                error = without_traceback(raised)
            except DecodeError as raised:
                error = _malformed(raised)
            except Exception:  # boundary: the top of a call
                log.exception("%s could not be answered", kind.__name__)
                error = InternalError(_UNANSWERED)
            abort(context, error, transient)
            raise AssertionError("abort raises")

        return handle


def _malformed(error: DecodeError) -> ConchError:
    return InvalidArgumentError(f"the request message is malformed: {error}")


class _UnknownMethods:
    """Handlers of all other methods, which callers without the token don't find to be unknown."""

    def __init__(self, guard: AccessGuard) -> None:
        self._guard = guard

    def service(self, details: Any) -> Any:
        """The handler of a call."""
        return grpc.stream_stream_rpc_method_handler(self._refuse)

    def _refuse(self, messages: Iterator[bytes], context: Any) -> None:
        try:
            self._guard.open(ContextPeer(context), ANY, "unknown")
        except ConchError as error:
            abort(context, error)
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")


_MOST_CALLS = 512
_UNANSWERED = "the request could not be answered"
_ABORTS_S = 0.5
_ARGUMENTS = (
    ("grpc.so_reuseport", 0),
    # File overrides are large single messages.
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.server_handshake_timeout_ms", 10_000),
    # Detect dead clients of watches.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
)


class ControlPort:
    """Serves an agent's API on one port; `access` is the access policy, None for none.

    Raises:
        InvalidArgumentError: The port would be open to everyone.
    """

    def __init__(
        self,
        agent: AgentApi,
        options: ControlPortOptions,
        watches: int = MOST_WATCHES,
        loads: int = MOST_LOADS,
        access: Access | None = None,
    ) -> None:
        options.check()
        self._options = options
        self._guard = control_guard(access, options.token)
        self._service = ModelControl(agent, self._guard, watches, loads)
        self._handlers: list[Any] = [self._service.handlers()]
        if options.token is not None and access is None:
            self._handlers.append(_UnknownMethods(self._guard))
        self._threads = ThreadPoolExecutor(watches + loads + QUICK_THREADS, "conch-control-port")
        self._server: Any = None

    def start(self) -> int:
        """Starts the server; returns the port in use, which has no meaning for a Unix socket.

        Raises:
            UnavailableError: The address or the certificates are unusable.
        """
        options = self._options
        in_the_clear = self._guard.identifies and options.tls is None and not options.is_unix
        if in_the_clear and not is_loopback(options.address):
            log.warning("the control port lets tokens travel in plain text: use --control-use-ssl")
        connections = ("grpc.max_allowed_incoming_connections", most_descriptors(SMALL_PORT_SHARES))
        server = grpc.server(
            self._threads,
            handlers=self._handlers,
            options=(*_ARGUMENTS, connections),
            maximum_concurrent_rpcs=_MOST_CALLS,
        )
        try:
            if options.tls is None:
                port = server.add_insecure_port(options.target)
            else:
                port = server.add_secure_port(options.target, _credentials(options.tls))
        except (RuntimeError, ValueError) as error:
            # Only a started server releases its resources.
            server.start()
            server.stop(None).wait()
            raise UnavailableError(f"control port {options.target} can't be listened on: {error}") from None
        server.start()
        self._server = server
        return int(port)

    def refuse_changes(self) -> None:
        """Refuses changes from now on, before the server stops."""
        self._service.refuse_changes()

    def stop(self, grace_s: float) -> bool:
        """Ends all watches and waits for calls in flight; returns True if all have ended.

        A load that takes longer continues in the agent.
        """
        if self._server is None:
            return True
        self._service.stopping()
        ended = bool(self._server.stop(grace_s).wait(grace_s + _ABORTS_S))
        # gRPC forgets cancelled calls, but their handlers may still run.
        ended = self._service.wait_idle(_ABORTS_S) and ended
        self._threads.shutdown(wait=ended, cancel_futures=True)
        return ended


def _credentials(tls: ServerTls) -> Any:
    pair = (tls.private_key, tls.certificate)
    return grpc.ssl_server_credentials([pair], tls.client_root, tls.client_root is not None)
