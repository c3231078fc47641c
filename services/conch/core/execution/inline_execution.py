"""The policy of inline execution: which threads may run a version's batches, and when they wait for outcomes.

A thread that submits a request may get the claim on the next batch: it runs the batch soon, or releases the
claim. While a version is claimed, its requests wake no thread. Batches of instances that do not block are
only started inline; while they are short, the claimant then receives the outcome itself, because waking
another thread, which competes for the interpreter, takes longer than the batch.

Owns: the claim, the batch that is waited for, mean times. Locks: the runner's, but for the means: a lost
update does no harm to them. Used by: `Runner`, and the server of workers' calls.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from conch.core.scheduling.scheduler import Batch, OutcomeReader, OutcomeWait

FAST_NS = 500_000
"""Mean time of the batches of a fast version, and of computations that are waited for."""


class InlineExecution:
    """The claim on one version.

    Args:
        blocks: Whether its instances run batches on the thread that starts them; they are not waited for.
        answers: Whether responses may be sent by polling threads. Not those of decoupled models: sending may
            block until a client reads, and polling threads send.

    Attributes:
        allowed: Whether claims are given.
        claimed: Whether a thread has the claim.
        awaited: The batch whose outcome a claimant will receive.
    """

    __slots__ = ("_answers", "_blocks", "_computed_ns", "allowed", "awaited", "claimed", "mean_ns")

    def __init__(self, blocks: bool, answers: bool) -> None:
        self._blocks = blocks
        self._answers = answers
        self.allowed = True
        self.claimed = False
        self.awaited: Batch | None = None
        self.mean_ns = 0
        self._computed_ns = 0

    def record(self, batch: Batch) -> None:
        """Takes the times of a finished batch."""
        spent = batch.compute_end_ns - batch.compute_start_ns
        self.mean_ns = spent if not self.mean_ns else (7 * self.mean_ns + spent) // 8
        if not self._blocks:
            spent = max(batch.compute_output_start_ns - batch.compute_input_end_ns, 1)
            self._computed_ns = spent if not self._computed_ns else (7 * self._computed_ns + spent) // 8

    def wait(self) -> OutcomeWait | None:
        """Permission to wait for a batch that is about to start; None if it may take long."""
        if self._answers and 0 < self._computed_ns < FAST_NS:
            return OutcomeWait()
        return None

    def take_awaited(self) -> Batch | None:
        """Takes the awaited batch; exactly one thread then waits for its outcome or detaches it."""
        awaited, self.awaited = self.awaited, None
        return awaited

    def started(self, batch: Batch) -> OutcomeReader | None:
        """Makes a started batch the awaited one; else returns the reader, for the caller to detach.

        The batch has no outcome yet if its `starting` has just become false.
        """
        wait = batch.wait
        if wait is None or wait.reader is None:
            return None
        if batch.finished or self.awaited is not None:
            return wait.reader
        self.awaited = batch
        wait.continues = True
        return None


class _Thread(threading.local):
    bypasses: bool = False


_thread = _Thread()


@contextmanager
def bypassing_claims() -> Iterator[None]:
    """Lets requests submitted within start at once, without waiting for a claimant.

    The claimant may be the submitting thread, or a thread that waits for it.
    """
    outer, _thread.bypasses = _thread.bypasses, True
    try:
        yield
    finally:
        _thread.bypasses = outer


def bypasses_claims() -> bool:
    """Whether the calling thread is within `bypassing_claims`."""
    return _thread.bypasses
