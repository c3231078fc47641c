"""Loads ensemble versions: checks them against their composing models, without a backend."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import replace

from conch.core.ensembles.ensemble_model import EnsembleModel
from conch.core.errors import ConchError, InvalidArgumentError
from conch.core.registry import Entry, Registry
from conch.core.response_cache.cache_service import CacheService
from conch.core.servable import Servable
from conch.core.spec import EnsembleStep, ModelSpec
from conch.protocol.model_config_pb2 import ModelConfig
from conch_control.config.ensembles import completed, plan_ensemble
from conch_control.config.model_spec import build_spec
from conch_control.config.parse import normalize
from conch_control.config.problems import raise_first
from conch_control.config.validate import check_supported, config_problems, tensor_problems, uncacheable_text
from conch_control.lifecycle.cache_identity import EnsembleCacheIdentity, all_composing_models, wrap_in_cache
from conch_control.lifecycle.model_definition import Definition

log = logging.getLogger(__name__)


class EnsembleError(InvalidArgumentError):
    """An ensemble does not fit its models; `reason` is for operators, the message wraps it as Triton does."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"load failed for model '{name}': {reason}\n")
        self.reason = reason


class EnsembleLoader:
    """Loads ensembles."""

    def __init__(self, registry: Registry, cache: CacheService | None = None) -> None:
        self._registry = registry
        self._cache = cache

    def check(self, definition: Definition) -> None:
        """Checks the composing models before any version is loaded.

        Raises:
            EnsembleError: They are missing or do not fit; the text is Triton's.
        """
        try:
            self._prepare(definition, 0)
        except ConchError as error:
            raise EnsembleError(definition.name, error.message) from error

    def load(self, definition: Definition, version: int) -> Servable:
        """Loads a version.

        Raises:
            ConchError: The composing models no longer fit, or the config is invalid.
        """
        ensemble = self._prepare(definition, version)
        if limit := definition.config.ensemble_scheduling.max_inflight_requests:
            log.info("Ensemble model '%s' configured with max_inflight_requests: %d", definition.name, limit)
        return wrap_in_cache(self._cache, ensemble, EnsembleCacheIdentity(ensemble.spec, self._registry))

    def _prepare(self, definition: Definition, version: int) -> EnsembleModel:
        config = ModelConfig()
        config.CopyFrom(definition.config)
        check_supported(config, namespaces=bool(definition.namespace))
        normalize(config)
        raise_first(config_problems(config))
        raise_first(tensor_problems(config))
        name = definition.name
        self._check_cycle(
            name, definition.parts or [step.model_name for step in config.ensemble_scheduling.step]
        )

        def find_model(step: EnsembleStep) -> ModelSpec:
            return self._find(name, step)

        spec = _identified(build_spec(config, definition.directory, version, "", {}), definition)
        plan = plan_ensemble(spec, find_model)
        # Overrides the config's value, as in Triton.
        config.model_transaction_policy.decoupled = plan.decoupled
        raise_first(config_problems(config))
        if spec.max_queue_size:
            raise InvalidArgumentError(
                f"a maximum queue size can not be specified for ensemble '{name}': its models have the queues"
            )
        if spec.cached and any(
            part is not None and part.spec.sequence is not None
            for part in all_composing_models(spec, self._registry.resolve)
        ):
            raise InvalidArgumentError(uncacheable_text(name, "sequence batching scheduler"))
        spec = _identified(build_spec(config, definition.directory, version, "", {}), definition)
        spec = completed(spec, plan, find_model)
        return EnsembleModel(spec, plan, self._registry)

    def _find(self, ensemble: str, step: EnsembleStep) -> ModelSpec:
        entry = self._registry.entries.get(step.model_name, Entry())
        if entry.default is None:
            raise InvalidArgumentError(
                f"ensemble '{ensemble}' depends on '{step.model_name}' which has no loaded version."
                f"{_because(step.model_name, entry)}"
            )
        model = entry.default if step.model_version < 0 else entry.ready.get(step.model_version)
        if model is None:
            raise InvalidArgumentError(
                f"ensemble '{ensemble}' depends on '{step.model_name}' whose required version "
                f"{step.model_version} is not loaded."
            )
        return model.spec

    def _check_cycle(self, name: str, parts: Iterable[str]) -> None:
        """Raises if a loaded composing model contains the ensemble, as an older version may."""
        seen: set[str] = set()
        unseen = list(parts)
        while unseen:
            model = unseen.pop()
            if model in seen:
                continue
            seen.add(model)
            below = set(composing_models(self._registry.entries.get(model, Entry())))
            if name in below:
                raise InvalidArgumentError(cycle_text(name, model))
            unseen += below


def _identified(spec: ModelSpec, definition: Definition) -> ModelSpec:
    """The spec with identifiers in place of model names."""
    if not definition.namespace or spec.ensemble is None:
        return spec
    steps = zip(spec.ensemble.steps, definition.parts, strict=True)
    ensemble = replace(spec.ensemble, steps=tuple(replace(step, model_name=part) for step, part in steps))
    return replace(spec, ensemble=ensemble, namespace=definition.namespace)


def composing_models(entry: Entry) -> Iterator[str]:
    """Names of the composing models of a loaded ensemble; empty for other models."""
    for model in entry.ready.values():
        if model.spec.ensemble is not None:
            yield from (step.model_name for step in model.spec.ensemble.steps)


def cycle_text(first: str, last: str) -> str:
    """Triton's error for ensembles that contain each other."""
    return f"circular dependency between ensembles: {first} -> ... -> {last} -> {first}"


def failure_text(entry: Entry) -> str:
    """Triton's list of version errors of a composing model; empty if there are none."""
    return "".join(
        f"version {version} is at UNAVAILABLE state: {state.reason};"
        for version, state in sorted(entry.states.items())
        if state.reason and state.reason != "unloaded"
    )


def _because(name: str, entry: Entry) -> str:
    reasons = failure_text(entry)
    return f" Model '{name}' loading failed with error: {reasons}" if reasons else ""
