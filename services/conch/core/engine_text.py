"""Texts of engines' exceptions for clients: without places in the sources that an engine was built of.

Threads: any.
"""

from __future__ import annotations

import logging
import re

from conch.core.errors import message_of

log = logging.getLogger(__name__)

_LONGEST = 32 << 10
_SOURCE = r"(?<![\w./+~@-])(?:[\w.+~@-]*/)*[\w.+-]+\.(?:cc|cpp|cxx|cu|cuh|c|h|hh|hpp|inl)"
_PARENTHESES = r"\((?:[^()]|\([^()]*\))*\)"
# As GCC prints it: types, a qualified name, parameters, and what may follow.
_NAME = r"[\w:<>,*& ]*?::(?:operator\(\)|~?[\w<>]+)"
_FUNCTION = rf"{_NAME}{_PARENTHESES}(?:::<lambda{_PARENTHESES}>)?(?: const)?(?: \[with [^\]]*\])?"
_PLACES = [
    re.compile(pattern, re.DOTALL)
    for pattern in (
        r"\n *Stack trace:\n.*",  # XGBoost and treelite
        r"\n?Exception raised from [^\n]{0,500} \(most recent call first\):.*",  # PyTorch
        rf"\[\d\d:\d\d:\d\d\] {_SOURCE}:\d+: ",  # XGBoost and treelite
        rf"Exception from {_SOURCE}:\d+:\s*",  # OpenVINO
        rf' at "?{_SOURCE}"?(?::|, line )\d+',  # OpenVINO, PyTorch, LightGBM
        rf"{_SOURCE}:\d+ {_FUNCTION} ",  # ONNX Runtime, with the path
        r"(?<![\w./+~@-])[\w.+-]+\.(?:cc|h):\d+ \w+(?:\(\))? ",  # ONNX Runtime, with the name of the file
        rf"{_SOURCE}:\d+:? ?",  # LiteRT, and others
    )
]


def without_places(text: str) -> str:
    """A text without places in sources, in its first part: it may have what a client has sent."""
    shown, rest = text[:_LONGEST], text[_LONGEST:]
    for place in _PLACES:
        shown = place.sub("", shown)
    return (shown + rest).strip()


def engine_text(error: BaseException) -> str:
    """The text of an engine's exception for clients; the verbose log gets the whole one if it is longer."""
    text = message_of(error)
    shown = without_places(text)
    if len(shown) < len(text.strip()):
        log.debug("an engine failed: %s", text)
    return shown or type(error).__name__
