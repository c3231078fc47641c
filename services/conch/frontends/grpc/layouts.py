"""Where plain requests have what: found again by comparing bytes, without taking each message apart.

A client's requests mostly have the same bytes but for their ids and their raw contents. Where those are is
said by the tags and lengths around them. So a message that is as long as an earlier one, and has the same
bytes everywhere else, has everything in the same places.
"""

from __future__ import annotations

import threading

from conch.frontends.grpc.templates import LONGEST_KEY, Template, Templates
from conch.frontends.grpc.wire import MODEL_NAME, split_infer_request

MOST_KEYS = 4096
"""For how many pairs of a length and a model's name layouts are remembered."""

MOST_BYTES = 4 << 20
"""How much memory layouts may take, their keys and templates apart, in bytes."""

MOST_ALIKE = 4
"""How many layouts are remembered for each of them."""

_PIECE_BYTES = 320
"""About what a piece of a message takes besides its own bytes, for the objects that say where it is."""

_Key = tuple[int, bytes]
_Fixed = list[tuple[slice, bytes]]


class Layout:
    """What requests have in common whose messages differ in nothing but ids and raw contents of one length.

    Attributes:
        template: What they have in common with requests of other lengths.
        request_id: Where the text of the id is; None without one.
        raw: Where the raw contents are.
        inputs: Name, datatype, shape and place of each input; none if any of them may lie in a region.
    """

    __slots__ = ("inputs", "raw", "request_id", "template")

    def __init__(self, template: Template, request_id: slice | None, raw: list[slice]) -> None:
        self.template = template
        self.request_id = request_id
        self.raw = raw
        self.inputs = (
            [(*tensor, place) for tensor, place in zip(template.inputs, raw, strict=True)]
            if template.parts is None
            else []
        )

    def fixed(self, message: bytes) -> _Fixed:
        """The bytes that all those messages have, and where, by one of them."""
        varying = self.raw if self.request_id is None else [self.request_id, *self.raw]
        starts = [0, *(place.stop for place in varying)]
        ends = [*(place.start for place in varying), len(message)]
        return [(place, message[place]) for place in map(slice, starts, ends) if place.start < place.stop]


class Layouts:
    """The layouts of plain messages; any number of threads may use them."""

    def __init__(self) -> None:
        self._templates = Templates()
        self._known: dict[_Key, tuple[tuple[_Fixed, Layout], ...]] = {}
        self._size = 0
        self._lock = threading.Lock()  # for those who change the two above

    def find(self, message: bytes) -> Layout | None:
        """The layout of a message; None if it is not that plain, and has to be parsed."""
        try:
            # The field of the model's name, or the beginning of a long one.
            key = (len(message), message[: message[1] + 2])
        except IndexError:
            return None
        for fixed, layout in self._known.get(key, ()):
            for place, data in fixed:
                if message[place] != data:
                    break
            else:
                return layout
        return self._learn(key, message)

    def _learn(self, key: _Key, message: bytes) -> Layout | None:
        split = split_infer_request(message)
        if split is None:
            return None
        common, request_id, raw = split
        template = self._templates.get(common) or self._templates.learn(common)
        if template is None or not template.takes(len(raw)):
            return None
        layout = Layout(template, request_id, raw)
        self._remember(key, message, layout)
        return layout

    def _remember(self, key: _Key, message: bytes, layout: Layout) -> None:
        if message[0] != MODEL_NAME:
            return  # then the key may be of what never repeats
        known = self._known
        with self._lock:
            alike = known.get(key)
            if alike is None:  # what was seen once is not worth more than the key
                if len(known) >= MOST_KEYS:
                    self._forget()
                known[key] = ()
                return
            fixed = layout.fixed(message)
            if sum(len(data) for _, data in fixed) > LONGEST_KEY:
                return
            for displaced, _ in alike[MOST_ALIKE - 1 :]:
                self._size -= _size(displaced)
            alike = alike[: MOST_ALIKE - 1]
            size = _size(fixed)
            if self._size + size > MOST_BYTES:
                self._forget()
                alike = ()
            self._size += size
            known[key] = ((fixed, layout), *alike)

    def _forget(self) -> None:
        """Messages that never repeat must not fill the memory."""
        self._known.clear()
        self._size = 0


def _size(fixed: _Fixed) -> int:
    """About how much memory a layout takes."""
    return sum(len(data) + _PIECE_BYTES for _, data in fixed)
