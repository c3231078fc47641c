"""What happens where memory that a client shares goes away while it is read or written.

A client can shrink its object at any moment, also in the middle of a copy, and the kernel then sends SIGBUS
to the thread that touches what is gone: the process would end. No check beforehand can rule that out. So a
handler of that signal puts empty memory in place of the whole region and marks the region as broken; the
thread goes on with zeros, and its request is answered with an error. All other faults end the process as
before.

The handler is a Python function. Unlike handlers of signals that come from outside it runs at a known point:
at an access to a region, which only code makes that copies or computes. So it may take the interpreter's
lock, which that code either holds or has given up, and allocate memory.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import signal
import threading

_SA_SIGINFO = 0x4
_SA_NODEFER = 0x40000000  # what else runs in the handler, such as a finalizer, may meet with a fault too
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_ADDRESS_AT = 16
_CODE_AT = 8

_Handler = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


class _Action(ctypes.Structure):
    """``struct sigaction`` of Linux's C libraries on processors with 64 bits."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ulong * 16),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


class Protected:
    """A mapping that may go away.

    Attributes:
        start: Its address, the start of a page.
        end: The address behind its last page.
        broken: Whether it has been replaced by empty memory.
    """

    __slots__ = ("broken", "end", "start")

    def __init__(self, start: int, byte_size: int) -> None:
        self.start = start
        self.end = start + -(-byte_size // mmap.PAGESIZE) * mmap.PAGESIZE
        self.broken = False


class FaultGuard:
    """The handler of SIGBUS, which is there as long as anything is protected.

    A process has one disposition of the signal, so it has one guard too; see `process_guard`.
    """

    def __init__(self) -> None:
        # Calls through `PyDLL` keep the interpreter's lock: the handler is over sooner.
        self._libc = ctypes.PyDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        self._libc.mmap.argtypes = (
            ctypes.c_void_p,
            ctypes.c_size_t,
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_long,
        )
        self._lock = threading.RLock()  # a finalizer that unprotects may run while it is held
        self._protected: dict[int, Protected] = {}  # by start
        self._callback = _Handler(self._on_fault)  # lives as long as the process may call it
        self._address = ctypes.cast(self._callback, ctypes.c_void_p).value
        self._previous = _Action()

    def protect(self, start: int, byte_size: int) -> Protected:
        """Protects a mapping, from the start of a page on.

        Raises:
            OSError: The signal can't be handled.
        """
        protected = Protected(start, byte_size)
        with self._lock:
            # Looked at each time: somebody else, such as faulthandler, may have taken the signal since.
            if not self.installed:
                self._install()
            self._protected[start] = protected
        return protected

    def unprotect(self, protected: Protected) -> None:
        """Ends the protection of a mapping that is about to go."""
        with self._lock:
            self._protected.pop(protected.start, None)
            if not self._protected and self.installed:
                self._sigaction(self._previous, None)

    @property
    def installed(self) -> bool:
        """Whether the signal is handled here."""
        action = _Action()
        self._sigaction(None, action)
        return bool(action.handler == self._address)

    def _install(self) -> None:
        action = _Action(handler=self._address, flags=_SA_SIGINFO | _SA_NODEFER)
        previous = _Action()
        self._sigaction(action, previous)
        self._previous = previous

    def _sigaction(self, action: _Action | None, old: _Action | None) -> None:
        new = None if action is None else ctypes.byref(action)
        if self._libc.sigaction(int(signal.SIGBUS), new, None if old is None else ctypes.byref(old)):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))

    def _on_fault(self, number: int, info: int, context: int) -> None:
        try:
            if ctypes.c_int.from_address(info + _CODE_AT).value <= 0:  # from a process, not from an access
                self._sigaction(self._previous, None)
                signal.raise_signal(signal.SIGBUS)
                return
            address = ctypes.c_size_t.from_address(info + _ADDRESS_AT).value
            for protected in list(self._protected.values()):
                if protected.start <= address < protected.end and self._replace(protected):
                    return
        except BaseException:  # returning without having changed anything would be an endless loop
            pass
        # The access is made again, and meets with what was there before.
        self._sigaction(self._previous, None)

    def _replace(self, protected: Protected) -> bool:
        """Puts empty memory in place of a mapping."""
        protected.broken = True
        length = protected.end - protected.start
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED | _MAP_NORESERVE
        made = self._libc.mmap(protected.start, length, protection, flags, -1, 0)
        return bool(made == protected.start)


@functools.cache
def process_guard() -> FaultGuard:
    """The one guard of this process."""
    return FaultGuard()
