"""The C host of backends that are compiled for Triton, called by ctypes; see ``conch_host.h``.

Calls run without the interpreter's lock. An object is used by any thread, unless a method says otherwise.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from conch.core.errors import ConchError, UnavailableError
from conch.workers.host.native_words import OK, code_of, error_of

_INTERFACE = 3
_OUT_WORDS = 1 << 14
_MORE_WORDS = 5
_WAIT_WORDS = 1 << 16
"""Words of a buffer at first; it grows for larger events."""

_TEXT, _U32, _U64, _I32, _POINTER = (
    ctypes.c_char_p,
    ctypes.c_uint32,
    ctypes.c_uint64,
    ctypes.c_int32,
    ctypes.c_void_p,
)
_OnConfig = ctypes.CFUNCTYPE(_I32, _TEXT)
_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "conch_interface": (_U32, ()),
    "conch_error_text": (_TEXT, ()),
    "conch_report_crashes": (None, ()),
    "conch_open": (_I32, (_POINTER, _TEXT, _TEXT, _TEXT, _TEXT)),
    "conch_facts": (_TEXT, (_POINTER,)),
    "conch_open_model": (
        _I32,
        (_POINTER, _TEXT, _U64, _TEXT, _TEXT, ctypes.c_bool, ctypes.c_bool, ctypes.c_bool, _OnConfig),
    ),
    "conch_set_config": (_I32, (_POINTER, _TEXT)),
    "conch_fail": (_I32, (_I32, _TEXT)),
    "conch_set_outputs": (None, (_POINTER, _U32, _POINTER, _U32)),
    "conch_open_instance": (
        _I32,
        (_POINTER, _U32, _TEXT, _I32, _I32, ctypes.c_bool, _TEXT, _U32, _POINTER),
    ),
    "conch_ready": (_I32, (_POINTER, _U32)),
    "conch_close": (None, (_POINTER,)),
    "conch_new_layout": (_POINTER, (_TEXT,)),
    "conch_free_layout": (None, (_POINTER,)),
    "conch_execute": (_I32, (_POINTER, _U32, _U32, _TEXT, _POINTER, _U64, _POINTER, _POINTER)),
    "conch_left": (_U64, (_POINTER, _U32, _POINTER, _U64)),
    "conch_cancel": (None, (_POINTER, _U64)),
    "conch_wait": (_U64, (_POINTER, _POINTER, _U64, _U32)),
    "conch_wake": (None, (_POINTER,)),
    "conch_free_result": (None, (_POINTER,)),
    "conch_set_log_levels": (None, (_U32,)),
    "conch_answer": (None, (_POINTER, _U64, _I32, _TEXT)),
    "conch_call_taken": (None, (_POINTER, _U64)),
    "conch_reply": (None, (_POINTER, _U64, _TEXT)),
}


class Buffer:
    """Memory that the host writes words to.

    Attributes:
        words: Its size; `data` has a few more, for readers of events.
        address: Address of its first byte.
        data: Its bytes.
    """

    __slots__ = ("_memory", "address", "data", "words")

    def __init__(self, words: int = _OUT_WORDS) -> None:
        self.grow(words)

    def grow(self, words: int) -> None:
        """Replaces the memory by more."""
        self._memory = (_U64 * (words + _MORE_WORDS))()
        self.words = words
        self.address = ctypes.addressof(self._memory)
        self.data = memoryview(self._memory).cast("B")


class ExecuteBuffers:
    """Output buffers of one instance's executions.

    Attributes:
        out: The events.
        times: The batch's compute start and end in ns; 0 if the backend reports none.
    """

    __slots__ = ("_written", "out", "times", "times_address", "written_address")

    def __init__(self) -> None:
        self.out = Buffer()
        self.times = (_U64 * 2)()
        self.times_address = ctypes.addressof(self.times)
        self._written = _U64()
        self.written_address = ctypes.addressof(self._written)

    @property
    def written(self) -> int:
        """The words of the events."""
        return self._written.value


class HostLibrary:
    """The functions of the C host.

    Args:
        path: The library, whose functions the backend finds as Triton's.

    Raises:
        UnavailableError: It can't be loaded, or belongs to another version of conch.
    """

    def __init__(self, path: Path) -> None:
        try:
            # Backends that are not linked with it find its functions, too.
            library = self._library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
            for name, (result, arguments) in _FUNCTIONS.items():
                function = getattr(library, name)
                function.restype, function.argtypes = result, arguments
        except (OSError, AttributeError) as error:
            raise UnavailableError(f"the package conch-native can't be used: {error}") from None
        found = library.conch_interface()
        if found != _INTERFACE:
            raise UnavailableError(
                f"the package conch-native has interface {found}, and this version of conch needs "
                f"{_INTERFACE}: install both of one version, with pip install --find-links dist "
                f"'conch[native]', in a checkout after `make wheel`"
            )
        self._host: int | None = None
        self._on_config: Any = None  # called by the host while the model opens

    # --- opening and closing, on one thread ----------------------------------------------------------------

    def report_crashes(self) -> None:
        """Has the C stack of a fatal signal written to standard error."""
        self._library.conch_report_crashes()

    def open(self, file: Path, name: str, config: str) -> dict[str, Any]:
        """Opens a backend; returns the properties that it reports.

        Raises:
            ConchError: The library can't be loaded, or its Initialize failed.
        """
        host = _POINTER()
        code = self._library.conch_open(
            ctypes.byref(host), _bytes(str(file)), _bytes(str(file.parent)), _bytes(name), _bytes(config)
        )
        self.check(code)
        self._host = host.value
        facts: dict[str, Any] = json.loads(self._library.conch_facts(self._host))
        return facts

    def open_model(
        self,
        name: str,
        version: int,
        directory: Path,
        config: str,
        completes: bool,
        decoupled: bool,
        iterative: bool,
        on_config: Callable[[str], None],
    ) -> None:
        """Makes the model; `on_config` gets each config that it sets, and may raise a `ConchError`.

        Raises:
            ConchError: Its ModelInitialize failed.
        """

        def called(text: bytes) -> int:
            try:
                on_config(text.decode("utf-8", "replace"))
            except ConchError as error:
                return int(self._library.conch_fail(code_of(error), _bytes(error.message)))
            return OK

        self._on_config = _OnConfig(called)
        self.check(
            self._library.conch_open_model(
                self._host,
                _bytes(name),
                version,
                _bytes(str(directory)),
                _bytes(config),
                completes,
                decoupled,
                iterative,
                self._on_config,
            )
        )

    def set_config(self, config: str) -> None:
        """Sets the text that the model finds as its config."""
        self.check(self._library.conch_set_config(self._host, _bytes(config)))

    def set_outputs(self, names: Sequence[str], states: int) -> None:
        """Sets the names of outputs, of which the last so many are states."""
        self._library.conch_set_outputs(self._host, len(names), _texts(names), states)

    def open_instance(
        self,
        index: int,
        name: str,
        kind: int,
        device: int,
        passive: bool,
        policy: str,
        profiles: Sequence[str],
    ) -> None:
        """Makes an instance.

        Raises:
            ConchError: Its ModelInstanceInitialize failed.
        """
        self.check(
            self._library.conch_open_instance(
                self._host,
                index,
                _bytes(name),
                kind,
                device,
                passive,
                _bytes(policy),
                len(profiles),
                _texts(profiles),
            )
        )

    def ready(self, index: int) -> bool:
        """True if an instance reports that it is ready."""
        return bool(self._library.conch_ready(self._host, index) == OK)

    def close(self) -> None:
        """Finalizes instances, model and backend."""
        if self._host is not None:
            self._library.conch_close(self._host)

    # --- requests ------------------------------------------------------------------------------------------

    def new_layout(self, words: bytes) -> int:
        """Makes a layout."""
        layout: int = self._library.conch_new_layout(words)
        return layout

    def free_layout(self, layout: int) -> None:
        """Frees a layout; requests keep it."""
        self._library.conch_free_layout(layout)

    def execute(self, index: int, count: int, words: bytes, into: ExecuteBuffers) -> None:
        """Runs a batch; `into` gets its events.

        Raises:
            ConchError: Execute failed, and so do all requests.
        """
        out = into.out
        code = self._library.conch_execute(
            self._host,
            index,
            count,
            words,
            out.address,
            out.words,
            into.written_address,
            into.times_address,
        )
        if code != OK:
            self.check(code)
        if into.written > out.words:
            out.grow(into.written)
            self._library.conch_left(self._host, index, out.address, out.words)

    def cancel(self, number: int) -> None:
        """Sets what the backend finds in IsCancelled."""
        self._library.conch_cancel(self._host, number)

    # --- events --------------------------------------------------------------------------------------------

    def wait(self, out: Buffer, timeout_ms: int) -> int:
        """Waits for events of no execution; returns their words; one thread at a time."""
        while True:
            written: int = self._library.conch_wait(self._host, out.address, out.words, timeout_ms)
            if written <= out.words:
                return written
            out.grow(written)

    def wake(self) -> None:
        """Ends a `wait`."""
        self._library.conch_wake(self._host)

    def free_result(self, result: int) -> None:
        """Frees what a response or a state holds."""
        self._library.conch_free_result(result)

    def set_log_levels(self, levels: int) -> None:
        """Sets the levels that are logged: bit N for ``TRITONSERVER_LogLevel`` N."""
        self._library.conch_set_log_levels(levels)

    # --- answers -------------------------------------------------------------------------------------------

    def answer(self, call: int, text: str) -> None:
        """Answers a query."""
        self._library.conch_answer(self._host, call, OK, _bytes(text))

    def refuse(self, call: int, error: ConchError) -> None:
        """Answers a query with an error."""
        self._library.conch_answer(self._host, call, code_of(error), _bytes(error.message))

    def call_taken(self, call: int) -> None:
        """The inputs of a call have been copied."""
        self._library.conch_call_taken(self._host, call)

    def reply(self, call: int, words: bytes) -> None:
        """A response to a call."""
        self._library.conch_reply(self._host, call, words)

    def check(self, code: int) -> None:
        """Raises the error of a code; call it on the thread of the call that returned it."""
        if code != OK:
            text: bytes = self._library.conch_error_text() or b""
            raise error_of(code, text.decode("utf-8", "replace"))


def waiting_buffer() -> Buffer:
    """A buffer for `HostLibrary.wait`."""
    return Buffer(_WAIT_WORDS)


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape").replace(b"\0", b"")


def _texts(texts: Sequence[str]) -> Any:
    return (_TEXT * len(texts))(*[_bytes(text) for text in texts])
