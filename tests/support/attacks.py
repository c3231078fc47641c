"""Attacks of a client that hold up a server, and the time of a health check meanwhile."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil
from tests.support.servers import ROOT, WAIT_S, ServerProcess

INFER = "/inference.GRPCInferenceService/ModelInfer"
STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
HEALTH = "/grpc.health.v1.Health/Check"

_PROBER = """
import sys, time
sys.path.insert(0, {root!r})
import grpc
from tests.support.attacks import cpu_s
check = grpc.insecure_channel({address!r}).unary_unary({method!r})
check(b"", timeout={timeout})
print("ready", flush=True)
worst, worst_cpu, count = 0.0, 0.0, 0
import threading
done = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), done.set()), daemon=True).start()
while not done.is_set():
    before, cpu = time.perf_counter(), cpu_s({pid})
    check(b"", timeout={timeout})
    worst = max(worst, time.perf_counter() - before)
    worst_cpu = max(worst_cpu, cpu_s({pid}) - cpu)
    count += 1
    done.wait(0.002)
print(worst, worst_cpu, count)
"""


def cpu_s(pid: int) -> float:
    """Processor time that a process has taken, in seconds."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


class HealthProbe:
    """Checks a server's health again and again, in a process of its own.

    Attributes:
        worst_s: Duration of the slowest check, once the block is over.
        worst_cpu_s: The most processor time that the server took during a check: unlike the time that passes,
            it does not grow with what else runs on the machine.
        count: Number of checks.
    """

    def __init__(self) -> None:
        self.worst_s = self.worst_cpu_s = 0.0
        self.count = 0


@contextmanager
def health_probe(server: ServerProcess) -> Iterator[HealthProbe]:
    """Probes a server while the block runs."""
    code = _PROBER.format(
        root=str(ROOT), address=server.address, pid=server.process.pid, method=HEALTH, timeout=2 * WAIT_S
    )
    probe = HealthProbe()
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield probe
            output, _ = process.communicate("", timeout=3 * WAIT_S)
            worst, worst_cpu, count = output.split()
            probe.worst_s, probe.worst_cpu_s, probe.count = float(worst), float(worst_cpu), int(count)
        finally:
            process.kill()


def _field(number: int, content: bytes) -> bytes:
    size, header = len(content), bytearray([number << 3 | 2])
    while size > 0x7F:
        header.append(size & 0x7F | 0x80)
        size >>= 7
    header.append(size)
    return bytes(header) + content


def _input(name: str, datatype: str, shape: bytes, contents: bytes | None = None, more: bytes = b"") -> bytes:
    body = _field(1, name.encode()) + _field(2, datatype.encode()) + _field(3, shape) + more
    if contents is not None:
        body += _field(5, contents)
    return _field(5, body)


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)


def infer_bodies(model: str, size: int) -> dict[str, Callable[[], bytes]]:
    """Makers of the worst ModelInfer messages of about `size` bytes, by name.

    Args:
        model: The model they are for; one with an input INPUT0 of strings and any shape.
        size: Size of the messages.
    """
    name = _field(1, model.encode())
    half = size // 2

    def strings(contents: bytes, count: int) -> bytes:
        return name + _input("INPUT0", "BYTES", _varint(1) + _varint(count), contents)

    return {
        "empty raw_input_contents": lambda: name + b"\x3a\x00" * half,
        "empty bytes_contents": lambda: strings(b"\x42\x00" * half, half),
        "empty inputs": lambda: name + b"\x2a\x00" * half,
        "empty outputs": lambda: name + b"\x32\x00" * half,
        "empty parameters": lambda: name + b"\x22\x00" * half,
        "unknown fields": lambda: name + b"\x78\x01" * half,
        "shape": lambda: name + _input("INPUT0", "FP32", b"\x01" * size),
        "empty parameters of an input": lambda: (
            name + _input("INPUT0", "FP32", b"\1", None, b"\x22\x00" * half)
        ),
        "fp32_contents": lambda: name + _input("INPUT0", "FP32", _varint(size // 4), _field(6, bytes(size))),
        "fp32_contents one by one": lambda: (
            name + _input("INPUT0", "FP32", _varint(size // 5), b"\x35\0\0\0\0" * (size // 5))
        ),
        "int64_contents": lambda: name + _input("INPUT0", "INT64", _varint(size), _field(3, b"\1" * size)),
        "int64_contents one by one": lambda: (
            name + _input("INPUT0", "INT64", _varint(half), b"\x18\1" * half)
        ),
        "bool_contents": lambda: name + _input("INPUT0", "BOOL", _varint(size), _field(1, b"\1" * size)),
        "raw strings": lambda: (
            name
            + _input("INPUT0", "BYTES", _varint(1) + _varint(size // 4))
            + _field(7, bytes(size // 4 * 4))
        ),
        "id": lambda: name + _field(3, b"a" * size),
        "model name": lambda: _field(1, b"a" * size),
        "nested contents": lambda: strings(b"\x2a\x00" * half, 1),
        "contents again and again": lambda: name + _input("INPUT0", "BYTES", b"\1", None, b"\x2a\x00" * half),
    }


STRINGS_CONFIG = """
    backend: "python"
    max_batch_size: 8
    input { name: "INPUT0" data_type: TYPE_STRING dims: [ -1 ] }
    output { name: "OUT" data_type: TYPE_STRING dims: [ -1 ] }
"""
STRINGS = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("OUT", request.inputs()[0].as_numpy()[:, :1])])
            for request in requests
        ]
"""
