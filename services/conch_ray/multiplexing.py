"""Sets of models that a replica serves: those of its start, those of `user_config`, multiplexed ones.

    set           loaded                              unloaded
    ============  ==================================  =====================================
    start         when the replica starts             never
    configured    by `configure`                      when a later config leaves it out
    multiplexed   by the first request with its id    as the least recently used, for another

A model in an upper set is not unloaded for a lower one. Threads and locks: event loop only; loads and unloads
run on threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from ray import serve

from conch.core.errors import InvalidArgumentError
from conch_api.embedded_server import Server

_KEY = "models"


class _MultiplexedModel:
    """Handle of a multiplexed model that Ray keeps, and deletes to make room."""

    def __init__(self, unload: Callable[[], None]) -> None:
        self._unload: Callable[[], None] | None = unload

    def __del__(self) -> None:
        """Unloads the model; Ray calls this, and the garbage collector again."""
        unload, self._unload = self._unload, None
        if unload is not None:
            unload()


class ReplicaModels:
    """The models of one replica.

    Args:
        server: The replica's server, which runs.
        start: Names of the models of its start.
        explicit: True if the server runs in mode ``explicit``.
        multiplexed: Most multiplexed models at a time; 0 for none.
    """

    def __init__(self, server: Server, start: Iterable[str], explicit: bool, multiplexed: int) -> None:
        self._server = server
        self._start = frozenset(start)
        self._explicit = explicit
        self._configured: set[str] = set()
        self._multiplexed: set[str] = set()
        self._configuring = asyncio.Lock()
        self._load_multiplexed: Callable[[str], Awaitable[object]] | None = None
        if multiplexed:

            async def load(name: str) -> _MultiplexedModel:
                await asyncio.to_thread(server.load, name)
                self._multiplexed.add(name)
                return _MultiplexedModel(lambda: self._evict(name))

            self._load_multiplexed = serve.multiplexed(max_num_models_per_replica=multiplexed)(load)

    async def configure(self, user_config: object) -> None:
        """Loads the models of a `user_config`, and unloads those of the one before that it leaves out."""
        wanted = _configured_models(user_config)
        if not self._explicit:
            raise InvalidArgumentError(
                "user_config chooses the models to load: it needs model_control_mode='explicit'"
            )
        async with self._configuring:
            for name in sorted(wanted - self._start - self._configured):
                await asyncio.to_thread(self._server.load, name)
                self._configured.add(name)
            for name in sorted(self._configured - wanted):
                self._configured.discard(name)
                if name not in self._multiplexed:
                    await asyncio.to_thread(self._server.unload, name)

    async def need(self, name: str) -> None:
        """Loads a multiplexed model unless it is loaded; `name` is empty for a request without one."""
        if not name or name in self._start or name in self._configured:
            return
        if self._load_multiplexed is None:
            raise InvalidArgumentError(
                f"multiplexed_model_id '{name}': this deployment has no multiplexed models; bind it with "
                f"multiplexed_models=N"
            )
        await self._load_multiplexed(name)

    def _evict(self, name: str) -> None:
        self._multiplexed.discard(name)
        if name not in self._configured:
            self._server.unload(name)


def _configured_models(user_config: object) -> set[str]:
    if not isinstance(user_config, dict) or set(user_config) != {_KEY}:
        raise InvalidArgumentError(
            f"user_config must be a dict with the key '{_KEY}' and no other, not {user_config!r}"
        )
    names = user_config[_KEY]
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) and name for name in names):
        raise InvalidArgumentError(f"user_config: '{_KEY}' must be a list of names, not {names!r}")
    return set(names)
