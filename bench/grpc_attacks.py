"""Health checks while one client sends the worst: `python -m bench.grpc_attacks`, see bench/README.md."""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import grpc
from tests.support.attacks import INFER, STREAM, STRINGS, STRINGS_CONFIG, health_probe, infer_bodies
from tests.support.servers import RawClient, ServerProcess, serving_process, write_model

_QUIET_S = 2.0
_AFTER_S = 0.3
_LONGEST_S = 60.0


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the slowest health check beside each message."""
    parser = argparse.ArgumentParser(prog="bench.grpc_attacks")
    parser.add_argument("--megabytes", type=int, default=6, help="how long the messages are")
    parser.add_argument("--only", default="", help="a part of the names of those to send")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as directory:
        write_model(Path(directory), "strings", STRINGS_CONFIG, {"model.py": STRINGS})
        with serving_process(Path(directory)) as server:
            with health_probe(server) as probe:
                threading.Event().wait(_QUIET_S)
            print(
                "| message | way | slowest health check, ms | health checks | the call itself, s | answer |"
            )
            print("|---" * 6 + "|")
            print(f"| none | | {probe.worst_s * 1e3:.1f} | {probe.count} | | |")
            for name, make in infer_bodies("strings", given.megabytes << 20).items():
                if given.only in name:
                    message = make()
                    for stream in (False, True):
                        print(
                            f"| {name} | {'stream' if stream else 'call'} | {_row(server, message, stream)} |"
                        )


def _row(server: ServerProcess, message: bytes, stream: bool) -> str:
    with closing(RawClient(server.address)) as raw, health_probe(server) as probe:
        before = time.perf_counter()
        answer = "completed"
        try:
            if stream:
                list(raw.channel.stream_stream(STREAM)(iter([message]), timeout=_LONGEST_S))
            else:
                raw.channel.unary_unary(INFER)(message, timeout=_LONGEST_S)
        except grpc.RpcError as error:
            answer = error.code().name
        took_s = time.perf_counter() - before
        threading.Event().wait(_AFTER_S)
    return f"{probe.worst_s * 1e3:.1f} | {probe.count} | {took_s:.2f} | {answer}"


if __name__ == "__main__":
    main()
