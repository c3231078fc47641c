"""CORS and CSRF protection: pages of other origins change nothing, and infer only if their origin is allowed.

A browser lets any page send some requests to any address, this machine's included, without asking the server
first. It marks them with `Origin` and `Sec-Fetch-Site`, which no page can set.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Mapping

from conch.frontends.http.http_exchange import HttpExchange

ANY_ORIGIN = "*"

_FORM_TYPES = frozenset((b"application/x-www-form-urlencoded", b"multipart/form-data", b"text/plain"))
"""Content types that need no CORS preflight."""

_EXPOSED = b"inference-header-content-length, retry-after, traceparent"
_MAX_AGE_S = b"600"


def cross_origin_reason(given: Mapping[bytes, bytes]) -> str:
    """Returns why a request with these headers counts as cross-origin, or an empty string."""
    origin, site = given.get(b"origin"), given.get(b"sec-fetch-site")
    if origin is not None and not _is_own(origin, given.get(b"host", b"")):
        return f"Origin is '{origin.decode('latin-1')}'"
    if site is not None and site not in (b"same-origin", b"none"):
        return f"Sec-Fetch-Site is '{site.decode('latin-1')}'"
    # Browsers that know neither header still call themselves Mozilla.
    if origin is None and site is None and given.get(b"user-agent", b"").startswith(b"Mozilla/"):
        kind = given.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if kind in _FORM_TYPES:
            return (
                f"Content-Type is '{kind.decode()}', which a form can send; a program sends application/json"
            )
    return ""


def _is_own(origin: bytes, host: bytes) -> bool:
    """True if the origin is this server, by an IP address or localhost (no DNS rebinding)."""
    place = origin.partition(b"://")[2].lower()
    if not place or place != host.lower():
        return False
    found = re.fullmatch(rb"\[([^]]+)\](?::[0-9]+)?|([^:]+)(?::[0-9]+)?", place)
    if found is None:
        return False
    name = (found[1] or found[2]).decode("latin-1")
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name == "localhost"
    return True


class CrossOriginInference:
    """Allows inference from pages of given origins (CORS).

    Args:
        origins: Origins such as ``https://app.example``, or `ANY_ORIGIN`.
    """

    def __init__(self, origins: Collection[str]) -> None:
        self._any = ANY_ORIGIN in origins
        self._origins = frozenset(origin.encode() for origin in origins)

    def answer(self, exchange: HttpExchange) -> bool:
        """Answers a preflight and returns True, or adds the CORS headers to the response to come."""
        fields = exchange.fields
        origin = fields.get(b"origin")
        if origin is None or not (self._any or origin in self._origins):
            return False
        exchange.extra_headers = [(b"access-control-allow-origin", origin), (b"vary", b"origin")]
        if exchange.method == "OPTIONS" and b"access-control-request-method" in fields:
            exchange.extra_headers += [
                (b"access-control-allow-methods", b"POST"),
                (b"access-control-allow-headers", fields.get(b"access-control-request-headers", b"")),
                (b"access-control-max-age", _MAX_AGE_S),
            ]
            exchange.respond(204, [])
            return True
        exchange.extra_headers.append((b"access-control-expose-headers", _EXPOSED))
        return False
