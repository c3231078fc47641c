"""Times of one principal beside another one that is far over its limit: ``python -m bench.access``.

A steady client sends 100 requests a second. Beside it, in turn: nothing; a client that sends 20 times as many
as its limit allows; and one that sends as many without a limit. All send at fixed times, whether they have
been answered or not, so that a slow answer delays no later request. Rounds are interleaved.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import threading
import time
from collections import Counter
from multiprocessing.pool import AsyncResult
from multiprocessing.pool import Pool as ProcessPool

import grpc

from bench.servers import COMMON, ROOT, Server, conch_command
from conch.protocol import inference_pb2 as messages

POLICY = ROOT / "bench" / "access.toml"
KEY = "bench-key-of-{}"
MODEL = "identity_fp32"
STEADY_PER_S = 100
GREEDY_PER_S = 300
SCENES = ("alone", "greedy", "unlimited")
_WIDTH = 16

Load = tuple[list[float], dict[str, int]]
"""Milliseconds of each request, and their number by gRPC status."""


def load(address: str, principal: str, per_s: int, seconds: float) -> Load:
    """Sends requests at a fixed rate; runs in a process of its own."""
    shape = messages.ModelInferRequest.InferInputTensor(name="INPUT0", datatype="FP32", shape=[1, _WIDTH])
    request = messages.ModelInferRequest(model_name=MODEL, inputs=[shape], raw_input_contents=[bytes(64)])
    metadata = (("authorization", f"Bearer {KEY.format(principal)}"),)
    taken: list[float] = []
    codes: Counter[str] = Counter()
    open_calls = threading.Semaphore(0)
    with grpc.insecure_channel(address) as channel:
        infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        message = request.SerializeToString()
        pause = threading.Event()
        begin = time.monotonic() + 0.1
        count = int(per_s * seconds)
        for number in range(count):
            due = begin + number / per_s
            pause.wait(max(due - time.monotonic(), 0.0))

            def done(call: grpc.Future, due: float = due) -> None:
                taken.append((time.monotonic() - due) * 1e3)
                codes[call.code().name] += 1
                open_calls.release()

            infer.future(message, metadata=metadata, timeout=30.0).add_done_callback(done)
        for _ in range(count):
            open_calls.acquire()
    return taken, dict(codes)


def measure(server: Server, scene: str, seconds: float, processes: ProcessPool) -> tuple[list[float], str]:
    """Milliseconds of the steady client's requests, and what the other one got."""
    other: AsyncResult[Load] | None = None
    if scene != "alone":
        other = processes.apply_async(load, (server.address, scene, GREEDY_PER_S, seconds + 0.5))
    taken, codes = processes.apply(load, (server.address, "steady", STEADY_PER_S, seconds))
    if codes.keys() != {"OK"}:
        raise RuntimeError(f"the steady client got {codes}")
    return taken, "" if other is None else str(other.get()[1])


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=3.0)
    options = parser.parse_args()
    flags = [f"--access-policy={POLICY}"]
    server = Server("conch-access", lambda ports: conch_command(ports, COMMON, flags))
    rounds: dict[str, list[tuple[float, float]]] = {scene: [] for scene in SCENES}
    with multiprocessing.get_context("spawn").Pool(2) as processes:
        server.start()
        try:
            measure(server, "alone", 1.0, processes)
            for number in range(options.rounds):
                for scene in SCENES[number % 3 :] + SCENES[: number % 3]:
                    taken, others = measure(server, scene, options.seconds, processes)
                    cuts = statistics.quantiles(taken, n=100)
                    rounds[scene].append((cuts[49], cuts[98]))
                    print(f"{scene:9} p50 {cuts[49]:6.2f} ms, p99 {cuts[98]:6.2f} ms  {others}", flush=True)
        finally:
            server.stop()
    print("\n| beside it | p50, ms | p99, ms |\n|---|---|---|")
    for scene, found in rounds.items():
        columns = [
            f"{statistics.median(each):.2f} [{min(each):.2f}-{max(each):.2f}]"
            for each in zip(*found, strict=True)
        ]
        print(f"| {scene} | {' | '.join(columns)} |")


if __name__ == "__main__":
    main()
