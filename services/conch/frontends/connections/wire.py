"""Sockets of connections, plain or with TLS, as the loop reads and writes them.

A handshake's steps run on a pool, as a signature with an RSA key takes up to 5 ms and a client may choose an
exchange of keys that takes 150. The loop waits for what the client sends, and watches nothing during a step:

    ============  ===============================  ======================================================
    the socket    goes on with                     is watched for
    ============  ===============================  ======================================================
    waits         an event, which begins a step    one event (EPOLLONESHOT)
    in a step     the step's end                   nothing; `close` closes it once the step has ended
    open                                           what its connection wants
    ============  ===============================  ======================================================

One client has one thread of the pool, and clients take turns. A connection in a handshake is one of
those that its port may have, and its timeout goes on.
"""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from select import EPOLLIN, EPOLLONESHOT, EPOLLOUT
from typing import Any, Protocol

from conch.core.tensor import Buffer
from conch.door.thread_pool import TurnPool
from conch.frontends.yield_gil import yield_gil
from conch.ipc.loop import IoLoop, Ready

_HANDSHAKES = TurnPool(2, "conch-tls", idle_s=0.5)
"""Threads of this process that run steps of handshakes."""
_MOST_BUFFERS = 1000  # of one call: IOV_MAX is 1024
_TLS_WRITE_BYTES = 64 * 1024


class Wire(Protocol):
    """A connected socket that does not block: calls that would raise BlockingIOError."""

    reads_all: bool

    def fileno(self) -> int:
        """Its descriptor."""

    def handshake(self, loop: IoLoop, connection: Ready) -> bool:
        """Goes on with the handshake of a connection that the loop knows.

        Returns:
            True at its end; False if `connection.on_ready` will be called to go on.

        Raises:
            OSError: It failed, or the client disconnected.
        """

    def recv(self, size: int) -> bytes:
        """Receives bytes; none at the end."""

    def recv_into(self, room: memoryview) -> int:
        """Receives into a buffer; 0 at the end."""

    def pending(self) -> int:
        """Bytes that were received from the client and not read yet: no event tells of them."""

    def send(self, buffers: Sequence[Buffer]) -> int:
        """Sends from buffers, in order; returns how many bytes were taken."""

    def shut_down(self) -> None:
        """Ends sending."""

    def say_goodbye(self) -> None:
        """Tells the client that nothing is cut off, before `close`."""

    def close(self) -> None:
        """Closes the socket."""

    def certificate_names(self) -> tuple[str, ...]:
        """Names in the client's certificate, such as ``cn:web`` or ``uri:spiffe://a/b``."""


class PlainWire:
    """A socket without TLS.

    Attributes:
        reads_all: True: `recv` returns less than it may only where nothing is left.
    """

    def __init__(self, connected: socket.socket) -> None:
        self.reads_all = True
        self._socket = connected
        # Without a method's frame between, as each request calls them.
        self.recv = connected.recv
        self.recv_into = connected.recv_into

    def fileno(self) -> int:
        """Its descriptor."""
        return self._socket.fileno()

    def handshake(self, loop: IoLoop, connection: Ready) -> bool:
        """True: there is none."""
        return True

    def pending(self) -> int:
        """None: the kernel has them."""
        return 0

    def send(self, buffers: Sequence[Buffer]) -> int:
        """Sends from buffers, in order."""
        if len(buffers) == 1:
            return self._socket.send(buffers[0])
        return self._socket.sendmsg(buffers[:_MOST_BUFFERS])

    def shut_down(self) -> None:
        """Ends sending."""
        self._socket.shutdown(socket.SHUT_WR)

    def say_goodbye(self) -> None:
        """Needs nothing: the end of the stream says it."""

    def close(self) -> None:
        """Closes the socket."""
        self._socket.close()

    def certificate_names(self) -> tuple[str, ...]:
        """None."""
        return ()


def _joined(buffers: Sequence[Buffer]) -> bytes:
    """The first buffers that are about `_TLS_WRITE_BYTES` together."""
    size = 0
    for count, buffer in enumerate(buffers, 1):
        size += len(buffer)
        if size >= _TLS_WRITE_BYTES:
            return b"".join(buffers[:count])
    return b"".join(buffers)


class TlsWire:
    """A socket with TLS.

    Args:
        connected: The socket.
        context: Settings of TLS.
        http2: True to refuse clients that do not offer HTTP/2.
    """

    def __init__(self, connected: socket.socket, context: ssl.SSLContext, http2: bool) -> None:
        self.reads_all = False
        self._http2 = http2
        self._socket = context.wrap_socket(
            connected, server_side=True, do_handshake_on_connect=False, suppress_ragged_eofs=True
        )
        self._begun = False
        self._step: Future[int | None] | None = None

    def fileno(self) -> int:
        """Its descriptor."""
        return self._socket.fileno()

    def handshake(self, loop: IoLoop, connection: Ready) -> bool:
        """Begins a step of the handshake, or goes on after one."""
        step, self._step = self._step, None
        if step is not None:
            events = step.result()
            if events is None:
                raise ConnectionError("TLS's handshake has failed")
        elif self._begun:
            self._begin_step(loop, connection)
            return False
        else:
            self._begun = True
            events = EPOLLIN
        loop.modify(self.fileno(), events | EPOLLONESHOT if events else EPOLLIN)
        return not events

    def _begin_step(self, loop: IoLoop, connection: Ready) -> None:
        address = self._socket.getpeername()
        client = str(address[0]) if isinstance(address, tuple) else ""
        try:
            self._step = _HANDSHAKES.submit_in_turn(client, self._run_step)
        except RuntimeError as error:
            raise ConnectionError(f"no thread can be started: {error}") from None
        self._step.add_done_callback(lambda _: loop.call_soon(partial(connection.on_ready, EPOLLIN)))

    def _run_step(self) -> int | None:
        """Goes on with the handshake; returns the events that it waits for, 0 at its end; None if it fails.

        An error in a future would keep its frames, and so the socket, until the next garbage collection.
        """
        yield_gil()  # short steps in a row would keep it from the loop
        try:
            self._socket.do_handshake()
        except ssl.SSLWantReadError:
            return EPOLLIN
        except ssl.SSLWantWriteError:
            return EPOLLOUT
        except OSError:
            return None
        # See RFC 9113, section 3.2.
        offered = not self._http2 or self._socket.selected_alpn_protocol() == "h2"
        return 0 if offered else None

    def recv(self, size: int) -> bytes:
        """Receives bytes; none at the end."""
        try:
            return self._socket.recv(size)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None

    def recv_into(self, room: memoryview) -> int:
        """Receives into a buffer; 0 at the end."""
        try:
            return self._socket.recv_into(room)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None

    def pending(self) -> int:
        """The rest of a record of which a part was read."""
        return self._socket.pending()

    def send(self, buffers: Sequence[Buffer]) -> int:
        """Sends the first buffers: TLS gathers none, so short ones are joined."""
        first = buffers[0]
        if len(buffers) > 1 and len(first) < _TLS_WRITE_BYTES:
            first = _joined(buffers)
        try:
            return self._socket.send(first)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None

    def shut_down(self) -> None:
        """Ends sending, without TLS's own farewell, which few clients wait for."""
        socket.socket.shutdown(self._socket, socket.SHUT_WR)

    def say_goodbye(self) -> None:
        """Sends TLS's farewell; does not wait for that of the client."""
        with suppress(OSError, ValueError):  # what the socket does not take now is left out
            self._socket.unwrap()

    def close(self) -> None:
        """Closes the socket, at the end of a step that runs."""
        step, self._step = self._step, None
        if step is None:
            self._socket.close()
        else:
            step.cancel()
            step.add_done_callback(lambda _: self._socket.close())

    def certificate_names(self) -> tuple[str, ...]:
        """Names in the client's certificate."""
        certificate: dict[str, Any] = self._socket.getpeercert() or {}
        names: list[str] = []
        for entry in certificate.get("subject", ()):
            names += [f"cn:{value}" for key, value in entry if key == "commonName"]
        names += [f"{kind.lower()}:{value}" for kind, value in certificate.get("subjectAltName", ())]
        return tuple(names)


def open_wire(accepted: socket.socket, tls: ssl.SSLContext | None, http2: bool) -> Wire:
    """The wire of an accepted connection."""
    accepted.setblocking(False)  # also of one that came from another process
    if accepted.family != socket.AF_UNIX:
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return PlainWire(accepted) if tls is None else TlsWire(accepted, tls, http2)


def tls_context(private_key: bytes, certificate: bytes, client_root: bytes | None) -> ssl.SSLContext:
    """Makes the TLS settings of a port from PEM contents; with `client_root`, clients need a certificate.

    Raises:
        OSError: The key or certificate can't be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["h2"])
    context.options |= ssl.OP_NO_RENEGOTIATION
    # Python's module takes keys from files only.
    with _secret_file(private_key) as key, _secret_file(certificate) as chain:
        try:
            context.load_cert_chain(chain.path, key.path)
            if client_root is not None:
                context.load_verify_locations(cadata=client_root.decode())
                context.verify_mode = ssl.CERT_REQUIRED
        except (ssl.SSLError, ValueError) as error:
            raise OSError(f"the TLS key or certificate can't be used: {error}") from None
    return context


class _secret_file:
    """Contents as a file in memory, without a name in any folder."""

    def __init__(self, contents: bytes) -> None:
        self._file = os.memfd_create("conch-tls", os.MFD_CLOEXEC)
        os.write(self._file, contents)
        self.path = f"/proc/self/fd/{self._file}"

    def __enter__(self) -> _secret_file:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._file)
