"""The text of an error as gRPC can carry it."""

from __future__ import annotations

_MOST_DETAILS = 4096
"""In bytes as they travel, percent-encoded."""
_PERCENT = ord("%")


def shown(details: str) -> bytes:
    """Status details as they can be sent: clients refuse trailers of more than some kilobytes."""
    encoded = details.encode(errors="replace")
    left = _MOST_DETAILS
    if 3 * len(encoded) > left:
        for position, byte in enumerate(encoded):
            left -= 1 if 0x20 <= byte < 0x7F and byte != _PERCENT else 3  # as %XX
            if left < 0:
                return encoded[:position].decode(errors="ignore").encode() + " …".encode()
    return encoded
