"""Builds the errors and the log report of a worker that died.

Owns: `CrashRecord`, the state of one lost worker.
Threads and locks: `CrashRecord` has a lock; all else is pure.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from conch.core.errors import ConchError, UnavailableError
from conch.ipc.spec_json import Library
from conch.workers.connection.in_flight import SentBatch

_SHOWN_BYTES = 2_048
_REPORTED_BYTES = 16_384
_MOST_IDS = 32
_FATAL = "Fatal Python error: "


def not_healthy(name: str, library: Library | None = None) -> str:
    """The sentence for a missing worker; that of Python models is Triton's."""
    if library is not None:
        return f"The worker of backend '{library.backend}' has ended."
    return f"Stub process '{name}' is not healthy."


def sentence(how: str, why: str = "") -> str:
    """Formats how a process ended, and why if it was killed."""
    verb = "was " if how.startswith("killed") else ""
    return f"Its process {verb}{how or 'does not end'}{f': {why}' if why else ''}."


def in_flight_error(
    name: str, detail: str, retry_after_ms: int, library: Library | None = None
) -> UnavailableError:
    """The error for requests of an instance without a worker; `retry_after_ms` hints at the next restart."""
    healthy = not_healthy(name, library)
    message = detail if detail.startswith(healthy) else f"{healthy} {detail}"
    subject = "model instance" if library is None else "model"
    error = UnavailableError(
        f"Failed to process the request(s) for {subject} '{name}', message: {message.strip()}"
    )
    error.retry_after_ms = max(retry_after_ms, 1)
    return error


def crashed(name: str, how: str, errors: str, library: Library | None = None) -> UnavailableError:
    """The error of a worker that died during its start; `how` is a sentence, `errors` its last output."""
    text = f"{not_healthy(name, library)} {how}"
    last = _end(errors.rstrip(), _SHOWN_BYTES)
    return UnavailableError(f"{text} The last it wrote to standard error:\n{last}" if last else text)


def crash_report(
    name: str,
    pid: int,
    how: str,
    errors: str,
    requests: Sequence[str],
    executing_s: float | None,
    library: Library | None = None,
) -> str:
    """Formats the log report of a serving worker's death.

    Args:
        name: The instance's name.
        pid: Its process id.
        how: Its end, as a sentence.
        errors: Its last lines of standard error.
        requests: The ids of its requests.
        executing_s: Age of its oldest batch in seconds; None without one.
        library: The backend, if it is compiled for Triton.
    """
    stack, before = split_errors(errors)
    lines = [f"worker of '{name}' (pid {pid}) died. {how}"]
    if library is not None:
        lines.append(f"backend: '{library.backend}', {library.file}")
    if requests:
        more = f" and {len(requests) - _MOST_IDS} more" if len(requests) > _MOST_IDS else ""
        ids = ", ".join(f"'{each}'" for each in requests[:_MOST_IDS])
        lines.append(f"requests in flight: {len(requests)}, with the ids {ids}{more}")
    else:
        lines.append("requests in flight: none")
    if executing_s is not None:
        lines.append(f"executing for: {executing_s:.3f} s")
    if stack:
        lines.append(f"stack:\n{_end(stack, _REPORTED_BYTES)}")
    last = _end(before.rstrip(), _REPORTED_BYTES)
    if last:
        lines.append(f"last on standard error:\n{last}")
    return "\n".join(lines)


def split_errors(errors: str) -> tuple[str, str]:
    """Splits standard error into the trailing faulthandler dump and the text before it."""
    start = errors.rfind("\n" + _FATAL) + 1
    if not errors.startswith(_FATAL, start):
        return "", errors
    return errors[start:].rstrip(), errors[:start]


def _end(text: str, most: int) -> str:
    """The last lines of a text, within the limit."""
    if len(text) <= most:
        return text
    cut = text[-most:]
    return "... " + (cut.partition("\n")[2] or cut)


class CrashRecord:
    """Records the reason of a worker's loss, and later the end of its process.

    Attributes:
        reason: Reason of the loss; None before.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.reason: str | None = None
        self._lock = threading.Lock()
        self._late: list[SentBatch] | None = []  # sent before the explanation is known
        self._explanation: ConchError | None = None

    def begin(self, reason: str) -> bool:
        """Records the loss; False if it was recorded before."""
        with self._lock:
            if self.reason is not None:
                return False
            self.reason = reason
            return True

    def refuse(self, sent: SentBatch) -> None:
        """Fails a batch sent to a lost worker, once the explanation is known."""
        with self._lock:
            if self._late is not None:
                self._late.append(sent)
                return
        sent.done(sent.batch, self.error())

    def explained(self, explanation: ConchError | None) -> list[SentBatch]:
        """Stores the explanation, None if only the reason is known; returns the late batches to fail."""
        with self._lock:
            self._explanation = explanation
            late, self._late = self._late or [], None
        return late

    def error(self) -> ConchError:
        """Makes a new error for requests that the lost worker can't answer."""
        known = self._explanation
        if known is not None:
            error = type(known)(known.message)
            error.retry_after_ms = known.retry_after_ms
            return error
        return UnavailableError(
            f"Failed to process the request(s) for model instance '{self._name}', message: Stub process "
            f"'{self._name}' is not healthy. The worker of the model is gone ({self.reason}); another one "
            f"takes its place, so the request may be sent again."
        )
