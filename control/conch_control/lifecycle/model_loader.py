"""Builds one ready version of a model: completes the config, loads the backend, runs warm-up.

Threads and locks: runs on the thread of the load, without a lock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from conch.core.backend import Backend, FindBackend
from conch.core.bls import Calls, ServerCalls
from conch.core.custom_metrics import FAMILIES, CustomFamilies
from conch.core.errors import ConchError
from conch.core.execution.instance_pool import Resize
from conch.core.execution.placement import counts_by_kind
from conch.core.execution.rate_limiter import RateLimiter
from conch.core.model_control import check_load_cancelled
from conch.core.model_version import Model
from conch.core.registry import Registry
from conch.core.response_cache.cache_service import CacheService
from conch.core.servable import Servable
from conch.core.servable_wrapper import ServableWrapper
from conch.core.spec import ModelSpec, WarmupSample
from conch.core.warmup_samples import further_samples
from conch.protocol.model_config_pb2 import ModelConfig
from conch_control.config.instance_groups import read_groups, resolving_groups
from conch_control.config.json_format import to_json
from conch_control.config.model_spec import build_spec
from conch_control.config.parse import normalize
from conch_control.config.platforms import checked_model_file, complete, is_ensemble, runtime_problems
from conch_control.config.problems import raise_first, result_or_raise
from conch_control.config.ragged import ragged_problems
from conch_control.config.validate import (
    check_supported,
    completed_problems,
    config_problems,
    tensor_problems,
)
from conch_control.config.warmup import read_warmup
from conch_control.control_options import ControlOptions
from conch_control.lifecycle.cache_identity import cache_identity, wrap_in_cache
from conch_control.lifecycle.ensemble_loader import EnsembleLoader
from conch_control.lifecycle.model_definition import Definition

Wrapper = Callable[[Servable], Servable]
"""Puts something before a loaded version, or returns it as it is; raises ConchError to fail the load."""


class ModelLoader:
    """Loads model versions.

    Attributes:
        wrappers: Wrap each version that is loaded, in this order, outside of its response cache.
    """

    def __init__(
        self,
        options: ControlOptions,
        get_backend: FindBackend,
        registry: Registry,
        cache: CacheService | None = None,
        calls: ServerCalls | None = None,
        families: CustomFamilies = FAMILIES,
    ) -> None:
        self._families = families
        self._calls = Calls(registry) if calls is None else calls
        self._get_backend = get_backend
        self._options = options
        self._cache = cache
        self.wrappers: list[Wrapper] = []
        self._ensembles = EnsembleLoader(registry, cache)
        limits = options.rate_limits
        self._limiter = None if limits is None else RateLimiter(limits)

    def check(self, definition: Definition) -> None:
        """Checks an ensemble's composing models; does nothing for other models.

        Raises:
            EnsembleError: They are missing or do not fit.
        """
        if is_ensemble(definition.config):
            self._ensembles.check(definition)

    def load(
        self, definition: Definition, version: int, on_warmup: Callable[[], None] = lambda: None
    ) -> Servable:
        """Loads a version with all its instances, warmed up.

        Raises:
            Exception: Any error of the backend; nothing is left behind.
        """
        if is_ensemble(definition.config):
            return self._wrapped(self._ensembles.load(definition, version))
        with self._families.used():
            return self._wrapped(self._load(definition, version, on_warmup))

    def _wrapped(self, model: Servable) -> Servable:
        try:
            for wrap in self.wrappers:
                model = wrap(model)
        except BaseException:
            model.close()
            raise
        return model

    def describe(self, definition: Definition, version: int) -> ModelSpec | None:
        """The spec that a load would make; None if only a load can tell it.

        The config has to list the tensors, and its completion must not run the model's code.

        Raises:
            ConchError: The load would fail.
        """
        config = ModelConfig()
        config.CopyFrom(definition.config)
        if is_ensemble(config) or not (config.input and config.output):
            return None
        backend = self._backend_of(config, definition.directory)
        if backend.completion_runs_code and not self._options.strict_model_config:
            return None
        raise_first(runtime_problems(config))
        spec, _ = self._finish(config, backend, definition.directory, version)
        return spec

    def _load(self, definition: Definition, version: int, on_warmup: Callable[[], None]) -> Servable:
        config = ModelConfig()
        config.CopyFrom(definition.config)
        check_supported(config)
        backend = self._backend_of(config, definition.directory)
        raise_first(runtime_problems(config))
        spec, warmup = self._finish(config, backend, definition.directory, version)
        spec = replace(spec, namespace=definition.namespace)
        # Before loading: later changes of files must not get the same identity.
        before = cache_identity(self._cache, spec)
        check_load_cancelled()
        model = Model.create(
            spec,
            backend.load_within(spec, self._calls),
            warmup=warmup,
            limiter=self._limiter,
            on_warmup=on_warmup,
        )
        return wrap_in_cache(self._cache, model, before)

    def resize(self, definition: Definition, model: Servable) -> Resize | None:
        """Prepares a change of instance groups; None if the version must be loaded again.

        Raises:
            Exception: Any error of the backend; nothing has changed.
        """
        while isinstance(model, ServableWrapper):
            model = model.model  # the wrappers stay
        if not isinstance(model, Model):
            return None
        # The completed values stay valid: their inputs have not changed.
        config = ModelConfig.FromString(model.spec.config_message)
        del config.instance_group[:]
        config.instance_group.extend(definition.config.instance_group)
        check_supported(config)
        backend = self._get_backend(config.backend, config.runtime, definition.directory)
        raise_first(resolving_groups(config, self._options.devices, backend))
        groups = read_groups(config)
        old, new = counts_by_kind(model.spec.instance_groups), counts_by_kind(groups)
        # Sequences are bound to slots of instances; preserve_ordering depends on the instance
        # count.
        fixed = model.spec.sequence is not None or definition.config.dynamic_batching.preserve_ordering
        if old != new if fixed or not backend.resizes else old.keys() != new.keys():
            return None
        spec = replace(
            model.spec,
            instance_groups=groups,
            config=to_json(config),
            config_message=config.SerializeToString(),
        )
        with self._families.used():
            samples = (*read_warmup(config, definition.directory), *further_samples(spec))
            return model.prepare_resize(spec, samples)

    def _backend_of(self, config: ModelConfig, directory: Path) -> Backend:
        """Finds the backend; errors of a complete config are reported before a missing backend."""
        try:
            return self._get_backend(config.backend, config.runtime, directory)
        except ConchError:
            if config.input and config.output:  # else completion might add them
                raise_first(completed_problems(config, self._options.devices))
            raise

    def _finish(
        self, config: ModelConfig, backend: Backend, directory: Path, version: int
    ) -> tuple[ModelSpec, tuple[WarmupSample, ...]]:
        """Completes and validates a config, and reads the files it names."""
        backend_options = self._options.options_of(config.backend)
        version_directory = directory / str(version)
        model_file = result_or_raise(checked_model_file(config, backend, directory, version_directory))
        config.platform = config.platform or backend.platform
        if not self._options.strict_model_config:
            config = complete(config, backend, version_directory, backend_options)
            model_file = result_or_raise(checked_model_file(config, backend, directory, version_directory))
        normalize(config)
        raise_first(config_problems(config))
        raise_first(resolving_groups(config, self._options.devices, backend))
        raise_first(tensor_problems(config))
        raise_first(ragged_problems(config))
        check_supported(config)  # again: the backend may have added fields
        spec = build_spec(
            config, directory, version, model_file, backend_options, self._options.max_queue_size
        )
        return spec, (*read_warmup(config, directory), *further_samples(spec))
