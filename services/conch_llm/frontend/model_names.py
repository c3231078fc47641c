"""Finds models by the names that clients use: the model's own, its aliases, and its adapters.

Triton's names can't hold ``/``, so that a model may have others: parameter `SERVED_NAMES` of its config, a
comma list. An adapter is a model to clients, by its name and, with a separator, by ``model<sep>adapter``.

Threads and locks: event loop only. The index is made again when the registry's entries have changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from conch.core.clock import wall_seconds
from conch.core.errors import UnavailableError
from conch.core.registry import Entry
from conch.core.servable import Servable
from conch.door.door import ServedModels
from conch_llm.capability import Capability, capability
from conch_llm.contract import ADAPTERS, CHAT, COMPLETIONS, EMBEDDINGS, SCORE, SERVED_NAMES
from conch_llm.frontend.openai_errors import UnknownModelError
from conch_llm.frontend.request_fields import MOST_NAME_BYTES

_UNLOADED = "unloaded"
_MOST_CLOSE = 3
_MOST_COMPARED = 64  # names, and characters of the one that is sought: the comparison takes a millisecond
_CAPABILITIES = {CHAT: "chat", COMPLETIONS: "completion", EMBEDDINGS: "embedding", SCORE: "score"}


@dataclass(frozen=True, slots=True)
class NamedModel:
    """A model under one of its names.

    Attributes:
        name: The name.
        servable: The version that serves it.
        capability: Routes that it can answer.
        created: Seconds since 1970 at which its version was first seen.
        adapter: The adapter that the name stands for; empty for none.
    """

    name: str
    servable: Servable
    capability: Capability
    created: int
    adapter: str = ""

    @property
    def own_name(self) -> str:
        """The model's own name."""
        return self.servable.spec.name

    @property
    def longest(self) -> int | None:
        """Most tokens of a prompt and its answer, if the config has it."""
        written = str(self.servable.spec.parameters.get("max_model_len", ""))
        return int(written) if written.isdecimal() else None

    def entry(self) -> dict[str, Any]:
        """Entry of the model in the list of models."""
        spec = self.servable.spec
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "conch",
            "root": self.adapter or spec.name,
            "parent": spec.name if self.adapter else None,
            "max_model_len": self.longest,
            "capabilities": [
                what
                for route, what in _CAPABILITIES.items()
                if self.capability.takes_body(route) or self.capability.takes_text(route)
            ],
        }


class ModelNames:
    """The models of a server by all their names.

    Args:
        models: The models.
        separator: Between a model and its adapter in names; empty for names of adapters alone.
        wall: Seconds since 1970.
    """

    def __init__(
        self, models: ServedModels, separator: str = "", wall: Callable[[], float] = wall_seconds
    ) -> None:
        self._models = models
        self._separator = separator
        self._wall = wall
        self._entries: Mapping[str, Entry] | None = None
        self._names: dict[str, NamedModel] = {}

    def find(self, name: str, visible: Callable[[str], bool] = lambda model: True) -> NamedModel | None:
        """The model of a name; None if it is not in memory, and a request loads it.

        Args:
            name: The name.
            visible: Returns True if the caller may see a model, by the model's own name.

        Raises:
            UnknownModelError: There is none; the text has close names.
            UnavailableError: It is not ready.
        """
        found = self._index().get(name)
        if found is not None:
            return found
        if len(name) > MOST_NAME_BYTES:
            raise UnknownModelError(
                f"There is no model with a name of more than {MOST_NAME_BYTES} characters"
            )
        self._check_state(name)
        if self._models.loads_on_demand(name):
            return None
        known = []
        if len(name) <= _MOST_COMPARED and len(self._names) <= _MOST_COMPARED:
            known = [each for each, model in self._names.items() if visible(model.own_name)]
        close = get_close_matches(name, known, _MOST_CLOSE)
        hint = f"; did you mean {' or '.join(f'`{each}`' for each in close)}?" if close else ""
        raise UnknownModelError(f"The model `{name}` does not exist{hint}")

    def all(self) -> Iterable[NamedModel]:
        """All names."""
        return self._index().values()

    def _check_state(self, name: str) -> None:
        """Raises UnavailableError: there is a model of the name that is not ready."""
        for identifier in self._models.identifiers(name):
            for state in self._models.entries[identifier].states.values():
                if state.state == "LOADING":
                    raise UnavailableError(f"The model `{name}` is not ready: it is being loaded")
                if state.state == "UNAVAILABLE" and state.reason != _UNLOADED:
                    raise UnavailableError(f"The model `{name}` is not ready: {state.reason}")

    def _index(self) -> Mapping[str, NamedModel]:
        entries = self._models.entries
        if entries is not self._entries:
            self._entries = entries
            self._names = self._made(entries)
        return self._names

    def _made(self, entries: Mapping[str, Entry]) -> dict[str, NamedModel]:
        before = {id(each.servable): each.created for each in self._names.values()}
        now = int(self._wall())
        found: dict[str, NamedModel] = {}
        aliases: dict[str, NamedModel] = {}
        for identifier, entry in entries.items():
            model = entry.default
            if model is None:
                continue
            can = capability(model.spec)
            created = before.get(id(model), now)
            name = self._models.name_of(identifier)
            found.setdefault(name, NamedModel(name, model, can, created))
            found.setdefault(identifier, NamedModel(identifier, model, can, created))
            for alias in _listed(model, SERVED_NAMES):
                aliases.setdefault(alias, NamedModel(alias, model, can, created))
            for adapter in _listed(model, ADAPTERS):
                shown = f"{name}{self._separator}{adapter}" if self._separator else adapter
                aliases.setdefault(shown, NamedModel(shown, model, can, created, adapter))
        return aliases | found


def _listed(model: Servable, parameter: str) -> Iterable[str]:
    written = str(model.spec.parameters.get(parameter, ""))
    return filter(None, (each.strip() for each in written.split(",")))
