"""Keeps the policy in effect up to date: rereads its files, and fetches signing keys from their URL.

The thread `conch-access` reads all files once a second; they are small, and contents say more than times of
modification. Changed contents are installed once they are the same for two readings, so that no half-written
file is. A policy with a mistake is logged and counted, and the one before stays in effect. `KeyFetcher` has a
thread of its own, `conch-jwks`, as a URL may hang.

Owns: both threads, and what was read last.
"""

from __future__ import annotations

import logging
import threading
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

from conch.access.access_guard import Access
from conch.access.policy_file import Policy, read_policy
from conch.access.policy_state import PolicyState
from conch.access.token_verifier import KeySet
from conch.core.clock import Clock, monotonic_ns
from conch.core.errors import InvalidArgumentError
from conch.core.timed_response import TimedResponse

log = logging.getLogger(__name__)

READ_S = 1.0
"""Seconds between readings of the files."""

FIRST_RETRY_S = 1.0
"""Seconds after a failed fetch until the next one; twice as many after each further failure."""

TIMEOUT_S = 10.0
"""Timeout of each step of a fetch: to connect, to send the request, and for the whole response."""

_FETCH_S = 300.0
_LONGEST_RETRY_S = 60.0
_ASKED_S = 60.0
_JOIN_S = 1.0
_MOST_BYTES = 1 << 20
_NS_PER_S = 1_000_000_000

Contents = dict[Path, bytes | None]
"""Contents of files; None for one that can't be read."""


class PolicyReload:
    """Reads the policy at the start, and again whenever its files change.

    Args:
        path: The policy file.

    Attributes:
        state: The policy as read at the start, for `Access`.

    Raises:
        InvalidArgumentError: The policy is wrong; the text says where.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._contents: Contents = {}
        self._candidate: Contents = {}
        self._policy = read_policy(path, self._read)
        self._fetcher: KeyFetcher | None = None
        self._access: Access | None = None
        self._left_out: tuple[str, ...] = ()
        self._ended = threading.Event()
        self._lock = threading.Lock()  # held while a state is made and installed
        self._thread: threading.Thread | None = None
        self.state = PolicyState(self._policy, self._policy.keys)

    def refuse_load_limits(self) -> None:
        """Raises InvalidArgumentError if a principal has a limit of loads: all models are in memory."""
        for entry in self._policy.principals:
            if entry.limits.cold_loads_per_minute is not None:
                raise InvalidArgumentError(
                    f"{self._path}: principal '{entry.name}': cold_loads_per_minute has an effect only with "
                    f"--model-control-mode=on-demand: leave it out"
                )

    def start(self, access: Access) -> None:
        """Installs changes from now on."""
        self._access = access
        with self._lock:
            self._fetcher = self._new_fetcher(self._policy)
            self._install(self._policy.keys)
        self._thread = threading.Thread(target=self._run, name="conch-access", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends both threads."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        if self._fetcher is not None:
            self._fetcher.stop()

    def _run(self) -> None:
        while not self._ended.wait(READ_S):
            try:
                self.reread_files()
            except Exception:  # boundary: the top of the thread
                log.exception("the access policy can't be reloaded")

    def reread_files(self) -> None:
        """Reads the files once; called by the thread."""
        found: Contents = {path: _contents(path) for path in self._contents}
        if found != self._contents and found == self._candidate:
            self._reload()
        self._candidate = found  # contents have settled when they are found twice

    def _reload(self) -> None:
        self._contents = {}
        assert self._access is not None, "called after the start"
        try:
            policy = read_policy(self._path, self._read)
        except InvalidArgumentError as error:
            self._access.reloads.add("failed")
            log.error("the access policy was not reloaded, the one before stays in effect: %s", error.message)
            return
        replaced = None
        with self._lock:
            if policy.jwks_url != self._policy.jwks_url:
                replaced, self._fetcher = self._fetcher, self._new_fetcher(policy)
            self._policy = policy
            self._install(policy.keys if self._fetcher is None else self._fetcher.keys)
        if replaced is not None:
            replaced.stop()
        self._access.reloads.add("ok")
        log.info("the access policy was reloaded, principals: %d", len(policy.principals))

    def _read(self, path: Path) -> bytes:
        """The contents of a file: those that have settled, or what is in a file that was not watched."""
        data = self._contents[path] = self._candidate.get(path)
        if data is None:
            data = self._contents[path] = path.read_bytes()
        return data

    def _new_fetcher(self, policy: Policy) -> KeyFetcher | None:
        """Has the keys of a policy fetched, if they are behind a URL."""
        assert self._access is not None, "called after the start"
        if not policy.jwks_url:
            return None
        return KeyFetcher(policy.jwks_url, self._install_keys, self._access.fetches.add)

    def _install_keys(self, fetcher: KeyFetcher) -> None:
        with self._lock:
            if fetcher is self._fetcher:  # and not one that was replaced meanwhile
                self._install(fetcher.keys)

    def _install(self, keys: KeySet | None) -> None:
        access = self._access
        assert access is not None, "called after the start"
        left_out = () if keys is None else keys.left_out
        if left_out != self._left_out:  # or each reload would tell it again
            self._left_out = left_out
            for text in left_out:
                log.warning("left out of the keys that sign tokens: %s", text)
        refresh = None if self._fetcher is None else self._fetcher.ask
        access.state = PolicyState(self._policy, keys, access.state.limiters, refresh)


def _contents(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except (OSError, ValueError):  # NUL in the path
        return None


class KeyFetcher:
    """Fetches a JWK set at the start, every five minutes, and when a token names an unknown key.

    After a failure it tries again after a second, and then after twice as long each time; the keys before
    stay in effect. Tokens with unknown keys cause at most one fetch in a minute.

    Args:
        url: Address of the set; redirections are not followed.
        installed: Called on the thread when there are other keys.
        counted: Called on the thread with the result of each fetch, ``ok`` or ``failed``.

    Attributes:
        keys: The last set; None before the first.
    """

    def __init__(
        self,
        url: str,
        installed: Callable[[KeyFetcher], None],
        counted: Callable[[str], None],
        clock: Clock = monotonic_ns,
    ) -> None:
        self._url = url
        self._installed = installed
        self._counted = counted
        self._clock = clock
        self._text = b""
        self._asked_ns = clock()
        self._wake = threading.Event()
        self._ended = False
        self.keys: KeySet | None = None
        # Plain HTTP does not leave this machine, not even to a proxy.
        proxies: dict[str, str] | None = {} if url.lower().startswith("http:") else None
        self._opener = urllib.request.build_opener(
            _NoRedirects(), urllib.request.ProxyHandler(proxies), _TimedHttp(), _TimedHttps()
        )
        self._thread = threading.Thread(target=self._run, name="conch-jwks", daemon=True)
        self._thread.start()

    def ask(self) -> None:
        """Fetches soon, if the last fetch for a token was long enough ago; never blocks."""
        now = self._clock()
        if now - self._asked_ns >= _ASKED_S * _NS_PER_S:
            self._asked_ns = now
            self._wake.set()

    def stop(self) -> None:
        """Ends the thread; one that hangs in a fetch ends later, and installs nothing."""
        self._ended = True
        self._wake.set()
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        retry_s = FIRST_RETRY_S
        while not self._ended:
            try:
                self._fetch()
            except Exception as error:  # boundary: the top of the thread, which tries again
                self._counted("failed")
                log.warning("the keys of tokens can't be fetched, again in %g s: %s", retry_s, error)
                wait_s, retry_s = retry_s, min(2 * retry_s, _LONGEST_RETRY_S)
            else:
                self._counted("ok")
                wait_s, retry_s = _FETCH_S, FIRST_RETRY_S
            self._wake.wait(wait_s)
            self._wake.clear()

    def _fetch(self) -> None:
        try:
            with self._opener.open(self._url, timeout=TIMEOUT_S) as answer:
                text = answer.read(_MOST_BYTES + 1)
        except HTTPError as error:
            error.close()  # it has the connection
            raise
        if len(text) > _MOST_BYTES:
            raise ValueError(f"{self._url} has more than {_MOST_BYTES} bytes")
        if text != self._text:
            self.keys = KeySet(text)
            self._text = text
            if not self._ended:
                self._installed(self)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Refuses redirections, which could lead to another host or to plain text."""

    def redirect_request(self, *_: Any) -> None:
        """Follows none: the redirection is an error then."""


class _TimedHandler(urllib.request.AbstractHTTPHandler):
    """Limits the time of each response."""

    def do_open(self, http_class: Any, req: Any, **http_conn_args: Any) -> Any:
        """Opens a connection whose responses are timed."""

        def timed(*arguments: Any, **named: Any) -> Any:
            connection = http_class(*arguments, **named)
            connection.response_class = TimedResponse
            return connection

        return super().do_open(timed, req, **http_conn_args)


class _TimedHttp(_TimedHandler, urllib.request.HTTPHandler):
    """Opens URLs with http."""


class _TimedHttps(_TimedHandler, urllib.request.HTTPSHandler):
    """Opens URLs with https."""
