"""Operator that swaps a model, and goes back if the new version answers wrongly."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from airflow.sdk import BaseOperator

from airflow_provider_conch.golden import NATIVE, Golden
from airflow_provider_conch.hook import ConchError, ConchHook, ConchUnreachableError


class ConchModelSwapOperator(BaseOperator):
    """Loads a model anew, checks the answer of the version that serves now, and goes back if it is wrong.

    The server must allow loads (``--model-control-mode=explicit``). It serves the old version until the new
    one is ready, and goes on with it if the load fails. To go back is to load the former version with the
    former config; a model that was not loaded is unloaded.

    The return value has ``from`` and ``to``, the highest ready version before and the one that serves now
    (``from`` is None if there was none), and ``seconds``.

    Args:
        model: The model.
        version: The version to serve; None for what the model's version policy selects.
        config: A whole model config, which replaces the repository's.
        verify: A golden request: ``inputs`` as in the JSON of an inference request, ``outputs`` with the
            expected elements by name, and ``atol``, the largest difference of numbers (1e-4).
        timeout: Seconds for the load.
        conch_conn_id: The Airflow connection.
        arguments: Arguments of every operator.
    """

    template_fields: Sequence[str] = ("model", "version", "config", "verify")

    def __init__(
        self,
        *,
        model: str,
        version: int | str | None = None,
        config: Mapping[str, Any] | None = None,
        verify: Mapping[str, Any] | None = None,
        timeout: float = 600.0,
        conch_conn_id: str = ConchHook.default_conn_name,
        **arguments: Any,
    ) -> None:
        super().__init__(**arguments)
        self.model = model
        self.version = version
        self.config = config
        self.verify = verify
        self.timeout = timeout
        self.conch_conn_id = conch_conn_id

    def execute(self, context: Any) -> dict[str, Any]:
        """Swaps the model."""
        wanted = _number(self.version) if self.version else None
        if self.config and not isinstance(self.config, Mapping):
            raise ValueError(f"config: must be a dictionary, not {self.config!r}; {NATIVE}")
        golden = Golden.read(self.verify) if self.verify else None
        hook = ConchHook(self.conch_conn_id)
        if stable := hook.stable_version(self.model):
            raise ConchError(
                f"a load of '{self.model}' moves no requests: they go to version {stable}, "
                f"which has the label 'stable'; move the label, or use ConchRolloutOperator"
            )
        former = _Former.read(hook, self.model)
        config = self.config or (former.config if wanted else None)
        if config and wanted:
            config = _only(config, [wanted])
        begin = time.monotonic()
        loaded = False
        try:
            hook.load(self.model, config, self.timeout)
            loaded = True
            to = self._serving(hook, wanted)
            if golden:
                self._check(hook, to, golden)
        except BaseException as error:
            # A load that the server refuses or fails changes nothing. One without an answer may still run.
            if not loaded and type(error) is ConchError:
                raise
            outcome = self._go_back(hook, former, loaded)
            if not isinstance(error, Exception):  # a timeout of the task
                self.log.warning("%s", outcome)
                raise
            raise ConchError(f"{error}; {outcome}") from error
        return {"from": former.version, "to": to, "seconds": round(time.monotonic() - begin, 3)}

    def _serving(self, hook: ConchHook, wanted: int | None) -> int:
        """The version that serves, after a load."""
        ready = _ready(hook, self.model)
        if wanted is None and ready:
            return max(ready)
        if wanted in ready:
            return wanted
        reasons = {line.get("version"): line.get("reason") for line in hook.index(self.model)}
        why = reasons.get(str(wanted)) or "the version policy of the model does not select it"
        raise ConchError(f"version {wanted} of '{self.model}' is not ready after the load: {why}")

    def _check(self, hook: ConchHook, version: int, golden: Golden) -> None:
        try:
            difference = golden.difference(hook.infer(self.model, version, golden.inputs))
        except ConchError as error:
            raise ConchError(
                f"version {version} of '{self.model}' fails the golden request: {error}"
            ) from error
        if difference:
            raise ConchError(f"version {version} of '{self.model}' fails the golden request: {difference}")

    def _go_back(self, hook: ConchHook, former: _Former, loaded: bool) -> str:
        """Loads what served before; returns what became of that."""
        try:
            if not former.versions:
                hook.unload(self.model)
                return "the model is unloaded again"
            if loaded and self.config is None and _ready(hook, self.model) == former.versions:
                return f"version {former.version} was served before, too, so there is none to go back to"
            # A load that still runs is stopped by this one.
            hook.load(self.model, _only(former.config, former.versions), self.timeout)
        except ConchUnreachableError as error:
            return f"going back has no answer: {error}"
        except ConchError as error:
            return f"going back failed: {error}"
        return f"version {former.version} serves again"


@dataclass(frozen=True, slots=True)
class _Former:
    """Ready versions before a swap, none if the model was not loaded, and their config."""

    versions: Sequence[int]
    config: Mapping[str, Any]

    @classmethod
    def read(cls, hook: ConchHook, model: str) -> _Former:
        versions = _ready(hook, model)
        return cls(versions, hook.config(model) if versions else {})

    @property
    def version(self) -> int | None:
        return max(self.versions, default=None)


def _number(version: int | str) -> int:
    try:
        return int(version)
    except ValueError:
        raise ValueError(f"version: must be the number of a version, not '{version}'") from None


def _ready(hook: ConchHook, model: str) -> list[int]:
    """The ready versions."""
    return sorted(int(line["version"]) for line in hook.index(model) if line.get("state") == "READY")


def _only(config: Mapping[str, Any], versions: Sequence[int]) -> dict[str, Any]:
    """A config that serves these versions alone."""
    return {**config, "version_policy": {"specific": {"versions": list(versions)}}}
