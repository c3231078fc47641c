"""GET requests whose credentials stay with the host that they are for."""

from __future__ import annotations

import ipaddress
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException, HTTPResponse
from typing import Any
from urllib.parse import SplitResult, urljoin, urlsplit

from conch import __version__
from conch_hub.safe_text import safe
from conch_hub.source import PullError

_MOST_REDIRECTS = 5
_SILENCE_S = 60.0
_PORTS = {"http": 80, "https": 443}
_REDIRECTS = (301, 302, 303, 307, 308)
_BUSY = (408, 425, 429, 500, 502, 503, 504)


class BusyError(Exception):
    """A server can't be reached or answers later; another try may succeed."""


class StatusError(Exception):
    """A server refuses a request.

    Attributes:
        status: The HTTP status.
        headers: Headers of the answer.
    """

    def __init__(self, url: str, status: int, headers: Mapping[str, str]) -> None:
        super().__init__(f"'{shown(url)}' answers with HTTP status {status}")
        self.status, self.headers = status, headers


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def http_error_302(self, *_: Any, **__: Any) -> None:
        """Leaves redirects to `HttpClient`, which knows what may go with them."""

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302


class HttpClient:
    """Sends GET requests, by the proxies of the environment.

    Args:
        allow_http: True to send requests to other hosts without TLS.
    """

    def __init__(self, allow_http: bool = False) -> None:
        self._allow_http = allow_http
        self._opener = urllib.request.build_opener(_NoRedirect())

    def get(
        self, url: str, headers: Mapping[str, str] | None = None, secrets: Mapping[str, str] | None = None
    ) -> HTTPResponse:
        """An answer with status 200 or 206, after at most five redirects.

        Args:
            url: The address.
            headers: Sent to each host.
            secrets: Sent to the host and port of `url` only, and not after a redirect away from them.

        Raises:
            PullError: The URL may not be used, or redirects do not end.
            StatusError: The server refuses the request.
            BusyError: There is no answer, or one that asks for patience.
        """
        origin = self.origin(url)
        at = url
        for _ in range(_MOST_REDIRECTS + 1):
            here = self.origin(at)
            if origin.startswith("https:") and not here.startswith("https:") and not self._allow_http:
                raise PullError(
                    f"'{shown(url)}' redirects to '{shown(at)}', which has no TLS: use another source, or "
                    f"allow that with --allow-http"
                )
            sent = {**(headers or {}), **((secrets or {}) if here == origin else {})}
            request = urllib.request.Request(at, headers={"User-Agent": f"conch/{__version__}", **sent})
            try:
                answer = self._opener.open(request, timeout=_SILENCE_S)
            except urllib.error.HTTPError as error:
                with error:
                    place = error.headers.get("Location")
                    if error.code in _REDIRECTS and place:
                        at = _joined(at, place)
                        continue
                    if error.code in _BUSY:
                        raise BusyError(f"'{shown(at)}' answers with HTTP status {error.code}") from None
                    raise StatusError(at, error.code, dict(error.headers.items())) from None
            except (OSError, HTTPException) as error:
                reason = error.reason if isinstance(error, urllib.error.URLError) else error
                raise BusyError(f"'{shown(at)}' can't be reached: {reason}") from None
            assert isinstance(answer, HTTPResponse)
            return answer
        raise PullError(f"'{shown(url)}' redirects more than {_MOST_REDIRECTS} times: use its last address")

    def read(self, url: str, most: int, **given: Mapping[str, str]) -> tuple[bytes, Mapping[str, str]]:
        """A small body, and the headers of its answer. Raises as `get`, and PullError: it is too large."""
        with self.get(url, **given) as answer:
            try:
                body = answer.read(most + 1)
            except (OSError, HTTPException) as error:
                raise BusyError(f"'{shown(url)}' ends early: {error}") from None
            if len(body) > most:
                raise PullError(
                    f"'{shown(url)}' has more than {most} bytes, which is no description of a model"
                )
            return body, dict(answer.headers.items())

    def read_object(self, url: str, most: int, **given: Mapping[str, str]) -> dict[str, Any]:
        """A small JSON object. Raises as `read`."""
        body, _ = self.read(url, most, **given)
        return json_object(body, url)

    def origin(self, url: str) -> str:
        """Scheme, host and port of a URL. Raises PullError: it may not be used."""
        parts = _split(url)
        if parts.scheme == "http" and not (self._allow_http or is_local(parts.hostname or "")):
            raise PullError(
                f"'{shown(url)}' has no TLS, so that others may read and change it: use https://, or allow "
                f"that with --allow-http"
            )
        return f"{parts.scheme}://{parts.hostname}:{parts.port or _PORTS[parts.scheme]}"


def _joined(url: str, place: str) -> str:
    """The address that a redirect leads to. Raises PullError: it is none."""
    try:
        return urljoin(url, place)
    except ValueError:
        raise PullError(f"'{shown(url)}' redirects to '{shown(place)}', which is no URL") from None


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        known = parts.scheme in _PORTS and parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:
        known = False
    if not known or not (url.isascii() and url.isprintable() and " " not in url):
        raise PullError(f"'{shown(url)}' is no URL with https:// and a host")
    if parts.username or parts.password:
        raise PullError(
            f"'{shown(url)}': histories and logs keep a password in a URL: give a header with -H instead"
        )
    return parts


def is_local(host: str) -> bool:
    """True for names and addresses of this machine."""
    try:
        return host.lower() == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def shown(url: str) -> str:
    """A URL for texts: without user, query and fragment, which may be secret, and without odd characters."""
    place = url.partition("?")[0].partition("#")[0]
    scheme, slashes, rest = place.partition("://")
    host, slash, path = rest.partition("/")
    return safe(f"{scheme}{slashes}{host.rpartition('@')[2]}{slash}{path}")[:300]


def json_object(body: bytes, url: str) -> dict[str, Any]:
    """A JSON object. Raises PullError."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise PullError(
            f"'{shown(url)}' answers with something that is no JSON object: is the address right?"
        )
    return found
