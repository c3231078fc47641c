"""Long work that other threads are to run beside."""

from __future__ import annotations

import threading

_MOMENT_S = 0.0001
_NEVER = threading.Event()


def give_way() -> None:
    """Lets other threads run before the next piece of a long work.

    Python has a thread pass the interpreter on when another has waited for it for 5 ms without a break. Work
    in whose course numpy lets go of it for moments, and takes it back before anybody has woken up, is never
    told to: others may wait for as long as it takes. So it stops for a moment that is long enough.
    """
    _NEVER.wait(_MOMENT_S)
