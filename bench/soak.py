"""Puts a mixed load on a server for long and reports what it holds: `python -m bench.soak --minutes 30`.

The load is one process with a thread per kind of client: gRPC and HTTP requests of several sizes to models
in process and in workers, streams, shared memory, new connections, and requests that fail. Memory,
descriptors and threads of the server and its workers are read every ten seconds; growth compares the median
of the last quarter with that of the first one after warm-up.
"""

from __future__ import annotations

import argparse
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable
from statistics import median
from typing import NamedTuple
from uuid import uuid4

import numpy as np
import psutil
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client
import tritonclient.utils.shared_memory as shm
from tritonclient.utils import InferenceServerException

from bench.servers import BenchServer, conch_command

EVERY_S = 10.0
SIZES = (16, 16, 16, 4096, 150_000, 1_000_000)
MODELS = ("identity_fp32", "identity_worker")


class Sample(NamedTuple):
    """Resources of the server and its workers at one moment; memory in MB."""

    resident: float
    private: float
    descriptors: int
    threads: int


class Load:
    """Clients that send requests until they are stopped."""

    def __init__(self, grpc: str, http: str) -> None:
        self._grpc = grpc
        self._http = http
        self._stop = threading.Event()
        self.counts: Counter[str] = Counter()
        kinds = (self._unary, self._rest, self._stream, self._shared, self._connecting, self._failing)
        self._threads = [threading.Thread(target=self._run, args=(kind,)) for kind in kinds]

    def start(self) -> None:
        """Starts the clients."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Ends them."""
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self, kind: Callable[[int], None]) -> None:
        step = 0
        while not self._stop.is_set():
            try:
                kind(step)
                self.counts[kind.__name__.strip("_")] += 1
            except Exception as error:
                self.counts[f"{kind.__name__.strip('_')}: {type(error).__name__} {error}"] += 1
                self._stop.wait(0.1)
            step += 1

    def _unary(self, step: int) -> None:
        with grpc_client.InferenceServerClient(self._grpc) as client:
            for turn in range(50):
                values = np.zeros((1, SIZES[turn % len(SIZES)]), np.float32)
                tensor = grpc_client.InferInput("INPUT0", list(values.shape), "FP32")
                tensor.set_data_from_numpy(values)
                client.infer(MODELS[turn % 2], [tensor], request_id=f"{step}-{turn}")

    def _rest(self, step: int) -> None:
        with http_client.InferenceServerClient(self._http) as client:
            for turn in range(50):
                values = np.zeros((1, SIZES[turn % len(SIZES)]), np.float32)
                tensor = http_client.InferInput("INPUT0", list(values.shape), "FP32")
                tensor.set_data_from_numpy(values, binary_data=turn % 7 != 0)
                client.infer(MODELS[turn % 2], [tensor])

    def _stream(self, step: int) -> None:
        answers: queue.SimpleQueue[object] = queue.SimpleQueue()
        with grpc_client.InferenceServerClient(self._grpc) as client:
            client.start_stream(lambda result, error: answers.put(error or result))
            tensor = grpc_client.InferInput("INPUT0", [64], "FP32")
            tensor.set_data_from_numpy(np.zeros(64, np.float32))
            client.async_stream_infer("repeat_1000", [tensor], enable_empty_final_response=True)
            final = False
            while not final:
                answer = answers.get(timeout=30)
                if isinstance(answer, Exception):
                    raise answer
                parameters = answer.get_response().parameters  # type: ignore[attr-defined]
                final = parameters["triton_final_response"].bool_param
            client.stop_stream()

    def _shared(self, step: int) -> None:
        name = f"soak-{uuid4().hex}"
        values = np.zeros((1, 100_000), np.float32)
        region = shm.create_shared_memory_region(name, f"/{name}", 2 * values.nbytes)
        try:
            shm.set_shared_memory_region(region, [values])
            with grpc_client.InferenceServerClient(self._grpc) as client:
                client.register_system_shared_memory(name, f"/{name}", 2 * values.nbytes)
                tensor = grpc_client.InferInput("INPUT0", list(values.shape), "FP32")
                tensor.set_shared_memory(name, values.nbytes)
                output = grpc_client.InferRequestedOutput("OUTPUT0")
                output.set_shared_memory(name, values.nbytes, offset=values.nbytes)
                for model in MODELS:
                    client.infer(model, [tensor], outputs=[output])
                client.unregister_system_shared_memory(name)
        finally:
            shm.destroy_shared_memory_region(region)

    def _connecting(self, step: int) -> None:
        with http_client.InferenceServerClient(self._http) as client:
            client.is_server_ready()
            client.get_inference_statistics()

    def _failing(self, step: int) -> None:
        with grpc_client.InferenceServerClient(self._grpc) as client:
            tensor = grpc_client.InferInput("INPUT0", [1, 4], "FP32")
            tensor.set_data_from_numpy(np.zeros((1, 4), np.float32))
            for model in ("absent", "identity_fp32"):
                tensor.set_shape([1, 5])
                try:
                    client.infer(model, [tensor])
                except InferenceServerException:
                    continue
                raise AssertionError("a wrong request succeeded")


def sample() -> Sample:
    """Reads what the processes that this one has started hold."""
    held = []
    for process in psutil.Process().children(recursive=True):
        try:
            memory = process.memory_full_info()
            held.append((memory.rss / 1e6, memory.uss / 1e6, process.num_fds(), process.num_threads()))
        except psutil.NoSuchProcess:
            continue
    resident, private, descriptors, threads = (sum(column) for column in zip(*held, strict=True))
    return Sample(round(resident, 1), round(private, 1), int(descriptors), int(threads))


def main() -> None:
    """Runs the load and prints the samples and the growth."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--warm-up-minutes", type=float, default=3.0)
    options = parser.parse_args()
    server = BenchServer("conch", conch_command)
    server.start()
    load = Load(server.address, server.http)
    load.start()
    samples: list[Sample] = []
    began = time.monotonic()
    end = began + 60 * (options.warm_up_minutes + options.minutes)
    never = threading.Event()
    try:
        while time.monotonic() < end:
            never.wait(EVERY_S)
            now = sample()
            warm = time.monotonic() - began >= 60 * options.warm_up_minutes
            if warm:
                samples.append(now)
            state = "" if warm else " (warm-up)"
            print(f"{time.monotonic() - began:6.0f} s{state}: {now}", flush=True)
        load.stop()
        never.wait(60)
        after = sample()
    finally:
        load.stop()
        server.stop()
    quarter = max(len(samples) // 4, 1)
    first, last = (
        [median(column) for column in zip(*part, strict=True)]
        for part in (samples[:quarter], samples[-quarter:])
    )
    print(f"requests: {dict(load.counts)}")
    for name, before, later in zip(Sample._fields, first, last, strict=True):
        print(f"{name}: {before:.1f} -> {later:.1f} ({100 * (later - before) / before:+.1f} %)")
    print(f"a minute after the load: {after}")


if __name__ == "__main__":
    main()
