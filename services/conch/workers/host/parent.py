"""Has a worker end with the server that started it, whatever becomes of either."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Has the kernel kill this process when the thread that started it ends, even if it hangs in C code.

    A server that died before this has closed its end of the socket, which is the next thing to be read.

    Raises:
        OSError: The kernel can't do that.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
