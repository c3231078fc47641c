"""Blocks passed on between fronts and workers against copies: `python -m bench.front_blocks`.

A tensor goes from a front to the core, a worker and back, all in one process and one thread; the worker makes
another array of it. Prints the CPU time of all and the core's part in microseconds, the best of some rounds.
"""

from __future__ import annotations

import socket
import sys
import time
from contextlib import ExitStack

import numpy as np

from conch.core.tensor import Tensor
from conch.ipc.channel import Kind, PacketChannel
from conch.ipc.tensors import BlockTensor, MessageStream, StableTensor

SIZES = (40_000, 100_000, 200_000, 400_000, 600_000, 1_000_000, 4_000_000)
ROUNDS, REQUESTS = 6, 100
_now = time.thread_time


class Way:
    """The connections of one front and one worker."""

    def __init__(self, stack: ExitStack, passing: bool) -> None:
        self._passing = passing
        self._link, self._front = self._pair(stack, False)
        self._core, self._worker = self._pair(stack, True)

    @staticmethod
    def _pair(stack: ExitStack, worker: bool) -> tuple[MessageStream, MessageStream]:
        ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours, theirs = (
            MessageStream(
                PacketChannel(end, blocking=False), side, trusted=not worker, passes_blocks=end is ends[0]
            )
            for end, side in zip(ends, (False, worker), strict=True)
        )
        for side in (ours, theirs):
            stack.callback(side.close)
            stack.callback(side.channel.close)
        return ours, theirs

    @staticmethod
    def _send(stream: MessageStream, tensor: Tensor, passing: type[BlockTensor] | None = None) -> None:
        stream.send(Kind.DONE, 0, payload=stream.pack([[tensor]], passing=passing))

    def request(self, values: np.ndarray[tuple[int], np.dtype[np.float32]]) -> float:
        """One request; returns the core's CPU time."""
        self._send(self._front, Tensor.from_array("IN", values))
        began = _now()
        ((tensor,),) = self._link.receive().lists(1)
        self._send(self._core, tensor, StableTensor if self._passing else None)
        del tensor
        core_s = _now() - began
        ((tensor,),) = self._worker.receive().lists(1)
        output = Tensor.from_array("OUT", tensor.numpy() + 1)
        del tensor
        self._send(self._worker, output)
        del output
        began = _now()
        ((tensor,),) = self._core.receive().lists(1)
        self._send(self._link, tensor, BlockTensor if self._passing else None)
        del tensor
        core_s += _now() - began
        ((tensor,),) = self._front.receive().lists(1)
        b"".join([tensor.data])
        return core_s


def measure(nbytes: int, passing: bool) -> tuple[float, float]:
    """CPU of all and of the core, in microseconds a request."""
    values = np.zeros(nbytes // 4, np.float32)
    best = (float("inf"), float("inf"))
    with ExitStack() as stack:
        way = Way(stack, passing)
        for _ in range(ROUNDS):
            began = _now()
            core_s = sum(way.request(values) for _ in range(REQUESTS))
            best = min(best, ((_now() - began) / REQUESTS * 1e6, core_s / REQUESTS * 1e6))
    return best


def main() -> int:
    """Prints a table."""
    print("| bytes | passed on: all | core | copied: all | core |\n" + "|---:" * 5 + "|")
    for nbytes in SIZES:
        figures = [f"{each:.0f}" for passing in (True, False) for each in measure(nbytes, passing)]
        print(f"| {nbytes:,} | {' | '.join(figures)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
