"""SIGBUS handler that survives shared memory which a client shrinks during an access.

A client may shrink its object at any time, even in the middle of a copy. The kernel then sends SIGBUS to the
thread that touches the missing pages, which would end the process; no check beforehand can prevent that. The
handler maps empty memory over the whole region and marks it broken: the thread goes on with zeros, and the
request gets an error. All other faults end the process as before.

The handler is a Python function. It runs at a known point, an access to a region by code that copies or
computes, so it may take the interpreter lock, which that code holds or has released, and allocate memory.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import signal
import threading

_SA_SIGINFO = 0x4
_SA_NODEFER = 0x40000000  # a finalizer that runs in the handler may fault too
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
    """A protected mapping, from `start` to the end of its last page.

    Attributes:
        broken: True once it was replaced by empty memory.
    """

    __slots__ = ("broken", "end", "start")

    def __init__(self, start: int, byte_size: int) -> None:
        self.start = start
        self.end = start + -(-byte_size // mmap.PAGESIZE) * mmap.PAGESIZE
        self.broken = False


class FaultGuard:
    """The SIGBUS handler, installed while any mapping is protected; one per process, see `process_guard`."""

    def __init__(self) -> None:
        # `PyDLL` keeps the interpreter lock during calls, which makes the handler faster.
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
        """Protects a mapping that starts on a page boundary. Raises OSError: the signal can't be handled."""
        protected = Protected(start, byte_size)
        with self._lock:
            # Checked each time: other code, such as faulthandler, may have taken the signal.
            if not self.installed:
                self._install()
            self._protected[start] = protected
        return protected

    def unprotect(self, protected: Protected) -> None:
        """Ends the protection of a mapping that is about to be unmapped."""
        with self._lock:
            self._protected.pop(protected.start, None)
            if not self._protected and self.installed:
                self._sigaction(self._previous, None)

    @property
    def installed(self) -> bool:
        """True if this handler is installed."""
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
                if protected.start <= address < protected.end and self._replace(protected, address):
                    return
        except BaseException:  # returning without a change would repeat the fault for ever
            pass
        # The access repeats under the previous disposition.
        self._sigaction(self._previous, None)

    def _replace(self, protected: Protected, address: int) -> bool:
        """Maps empty memory over a mapping, or over one page if there is too little."""
        protected.broken = True
        page = address - address % mmap.PAGESIZE
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED | _MAP_NORESERVE
        for start, end in ((protected.start, protected.end), (page, page + mmap.PAGESIZE)):
            if self._libc.mmap(start, end - start, protection, flags, -1, 0) == start:
                return True
        return False


@functools.cache
def process_guard() -> FaultGuard:
    """The one guard of this process."""
    return FaultGuard()
