#!/usr/bin/env bash
# grpcio 1.85.1: in an asyncio server `context.set_compression` has no effect on the response of a unary call.
#
# Documented: it chooses the compression of a call, for servers with threads and with asyncio alike.
# Seen: a response of 1,000,000 zero bytes takes about 1,000,270 bytes on the wire where an asyncio handler of a
# unary call has asked for gzip, and about 1,260 from the server with threads, from an asyncio handler that
# streams, and from an asyncio server that was made with `compression=`. No error or warning is given.
#
# Ends with 0 while that is so, with 1 if it has changed. Needs Python 3.11 and pip.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check grpcio==1.85.1
"$folder/venv/bin/python" - <<'PROGRAM'
import asyncio
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc

SIZE = 1_000_000


class Relay:
    """Passes on one connection and counts the bytes that the server sends."""

    def __init__(self, port):
        self.received = 0
        self._server = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        client = self._listener.accept()[0]
        server = socket.create_connection(("127.0.0.1", self._server))
        threading.Thread(target=self._pass_on, args=(client, server, 0), daemon=True).start()
        self._pass_on(server, client, 1)

    def _pass_on(self, source, sink, weight):
        try:
            while data := source.recv(65536):
                self.received += weight * len(data)
                sink.sendall(data)
        except OSError:
            pass  # the other side has closed


def handlers(unary, stream):
    class Handlers(grpc.GenericRpcHandler):
        def service(self, details):
            if details.method == "/test/Unary":
                return grpc.unary_unary_rpc_method_handler(unary)
            return grpc.unary_stream_rpc_method_handler(stream)

    return Handlers()


def bytes_of_call(port, method):
    relay = Relay(port)
    with grpc.insecure_channel(f"127.0.0.1:{relay.port}") as channel:
        if method == "/test/Unary":
            size = len(channel.unary_unary(method)(b"x", timeout=60))
        else:
            size = sum(map(len, channel.unary_stream(method)(b"x", timeout=60)))
    assert size == SIZE
    return relay.received


METHODS = ("/test/Unary", "/test/Stream")


def with_threads():
    def unary(message, context):
        context.set_compression(grpc.Compression.Gzip)
        return bytes(SIZE)

    def stream(message, context):
        context.set_compression(grpc.Compression.Gzip)
        yield bytes(SIZE)

    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((handlers(unary, stream),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    sizes = [bytes_of_call(port, method) for method in METHODS]
    server.stop(0).wait()
    return sizes


async def with_asyncio(of_call, of_server):
    async def unary(message, context):
        if of_call is not None:
            context.set_compression(of_call)
        return bytes(SIZE)

    async def stream(message, context):
        if of_call is not None:
            context.set_compression(of_call)
        yield bytes(SIZE)

    server = grpc.aio.server(compression=of_server)
    server.add_generic_rpc_handlers((handlers(unary, stream),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    sizes = [await asyncio.to_thread(bytes_of_call, port, method) for method in METHODS]
    await server.stop(0)
    return sizes


gzip = grpc.Compression.Gzip
seen = {
    "threads, set_compression": with_threads(),
    "asyncio, set_compression": asyncio.run(with_asyncio(gzip, None)),
    "asyncio, compression of the server": asyncio.run(with_asyncio(None, gzip)),
}
print(f"grpcio {grpc.__version__}, Python {sys.version.split()[0]}: bytes on the wire of {SIZE:,}")
for case, (unary, stream) in seen.items():
    print(f"{case:36} unary {unary:9,}  stream {stream:9,}")
small = {case: (unary < SIZE // 10, stream < SIZE // 10) for case, (unary, stream) in seen.items()}
assert small == {
    "threads, set_compression": (True, True),
    "asyncio, set_compression": (False, True),
    "asyncio, compression of the server": (True, True),
}, "this has changed"
PROGRAM
