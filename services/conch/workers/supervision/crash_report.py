"""What is said of workers that died: to clients in a sentence, in the log in full."""

from __future__ import annotations

from collections.abc import Sequence

from conch.core.errors import UnavailableError
from conch.workers.supervision.child_process import split_errors

_SHOWN_BYTES = 2_048
_REPORTED_BYTES = 16_384
_MOST_IDS = 32


def not_healthy(name: str) -> str:
    """Triton's sentence for a worker that is not there."""
    return f"Stub process '{name}' is not healthy."


def sentence(how: str, why: str = "") -> str:
    """How a process ended as a sentence, with what was wrong with it where it did not end by itself."""
    verb = "was " if how.startswith("killed") else ""
    return f"Its process {verb}{how or 'does not end'}{f': {why}' if why else ''}."


def in_flight_error(name: str, detail: str, retry_after_ms: int) -> UnavailableError:
    """What requests are told whose instance has no worker any more.

    Args:
        name: The instance's name.
        detail: What is known beside that.
        retry_after_ms: When it may have one again.
    """
    healthy = not_healthy(name)
    message = detail if detail.startswith(healthy) else f"{healthy} {detail}"
    error = UnavailableError(
        f"Failed to process the request(s) for model instance '{name}', message: {message.strip()}"
    )
    error.retry_after_ms = max(retry_after_ms, 1)
    return error


def crashed(name: str, how: str, errors: str) -> UnavailableError:
    """The error of a start whose worker has died before it could answer.

    Args:
        name: The instance's name.
        how: How it ended, as a sentence.
        errors: The end of what it wrote to standard error.
    """
    text = f"{not_healthy(name)} {how}"
    last = _end(errors.rstrip(), _SHOWN_BYTES)
    return UnavailableError(f"{text} The last it wrote to standard error:\n{last}" if last else text)


def crash_report(
    name: str, pid: int, how: str, errors: str, requests: Sequence[str], executing_s: float | None
) -> str:
    """All that is known of the death of a worker that served.

    Args:
        name: The instance's name.
        pid: The number of its process.
        how: How it ended, as a sentence.
        errors: The end of what it wrote to standard error.
        requests: The ids of the requests that it had.
        executing_s: How long the oldest of their batches had been executed; None if there was none.
    """
    stack, before = split_errors(errors)
    lines = [f"worker of '{name}' (pid {pid}) died. {how}"]
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


def _end(text: str, most: int) -> str:
    """The end of a text, from the beginning of a line where it is cut."""
    if len(text) <= most:
        return text
    cut = text[-most:]
    return "... " + (cut.partition("\n")[2] or cut)
