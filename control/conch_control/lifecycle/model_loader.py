"""Makes one version of a model ready: completes its config, and has the backend load it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from conch.core.backend import Backend
from conch.core.calls import Calls, ServerCalls
from conch.core.custom_metrics import FAMILIES, CustomFamilies
from conch.core.errors import ConchError
from conch.core.execution.fleet import Resize
from conch.core.execution.limiter import RateLimiter
from conch.core.execution.placement import counts_by_kind
from conch.core.model import Model
from conch.core.registry import Registry
from conch.core.response_cache.cached import CachedModel
from conch.core.response_cache.service import CacheService
from conch.core.servable import Servable
from conch.core.spec import ModelSpec, WarmupSample
from conch.core.stopping import check_wanted
from conch.protocol.model_config_pb2 import ModelConfig
from conch_control.config.completion import checked_model_file, complete, runtime_problems
from conch_control.config.instance_groups import read_groups, resolve_groups
from conch_control.config.json_format import to_json
from conch_control.config.model_spec import build_spec
from conch_control.config.normalize import normalize
from conch_control.config.platforms import is_ensemble
from conch_control.config.problems import raise_first, result_or_raise
from conch_control.config.ragged import validate_ragged
from conch_control.config.validate import check_supported, validate_config, validate_tensors, whole_problems
from conch_control.config.warmup import read_warmup
from conch_control.lifecycle.cache_identity import load_identity, put_behind
from conch_control.lifecycle.ensemble_loader import EnsembleLoader
from conch_control.lifecycle.model_definition import Definition
from conch_control.options import ControlOptions

GetBackend = Callable[[str], Backend]
"""Finds a backend by name; raises InvalidArgumentError for one that does not exist."""


class Loader:
    """Loads model versions.

    Args:
        options: Settings of the control plane.
        get_backend: Finds a backend by name.
        registry: Where the models of ensembles are.
        cache: The response cache for models that want one; None for none.
        calls: The server, for its models; None where they must not load others.
        families: Where models make metrics of their own while they are loaded.
    """

    def __init__(
        self,
        options: ControlOptions,
        get_backend: GetBackend,
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
        self._ensembles = EnsembleLoader(registry, cache)
        limits = options.rate_limits
        self._limiter = None if limits is None else RateLimiter(limits)

    def check(self, definition: Definition) -> None:
        """Checks what can be checked before any version is loaded.

        Raises:
            EnsembleError: It is an ensemble whose models are not there, or do not fit.
        """
        if is_ensemble(definition.config):
            self._ensembles.check(definition)

    def load(
        self, definition: Definition, version: int, on_warmup: Callable[[], None] = lambda: None
    ) -> Servable:
        """Loads a version with all its instances, warmed up.

        Args:
            definition: The model.
            version: The version.
            on_warmup: Called before the first warm-up sample runs; not at all if there is none.

        Raises:
            Exception: Whatever the backend raises; nothing is left behind.
        """
        if is_ensemble(definition.config):
            return self._ensembles.load(definition, version)
        with self._families.used():
            return self._load(definition, version, on_warmup)

    def _load(self, definition: Definition, version: int, on_warmup: Callable[[], None]) -> Servable:
        config = ModelConfig()
        config.CopyFrom(definition.config)
        check_supported(config)
        backend = self._backend_of(config)
        raise_first(runtime_problems(config))
        spec, warmup = self._finish(config, backend, definition.directory, version)
        spec = replace(spec, namespace=definition.namespace)
        # Before anything is loaded: what changes from here on must not pass for what was.
        before = load_identity(self._cache, spec)
        check_wanted()
        model = Model.create(
            spec,
            backend.load_within(spec, self._calls),
            warmup=warmup,
            limiter=self._limiter,
            on_warmup=on_warmup,
        )
        return put_behind(self._cache, model, before)

    def resize(self, definition: Definition, model: Servable) -> Resize | None:
        """Makes ready a change of instance groups, if it is one of names and of the number of instances.

        Args:
            definition: The model's definition, which differs from the one that was loaded in its instance
                groups and nothing else.
            model: A version of it that serves.

        Returns:
            The change, for the caller to commit or abandon; None if the version must be loaded anew.

        Raises:
            Exception: Whatever the backend raises; nothing has changed.
        """
        if isinstance(model, CachedModel):
            model = model.model  # the cache in front of it stays
        if not isinstance(model, Model):
            return None
        # What the backend completed stays as it is: nothing that it looked at has changed.
        config = ModelConfig.FromString(model.spec.config_message)
        del config.instance_group[:]
        config.instance_group.extend(definition.config.instance_group)
        check_supported(config)
        resolve_groups(config, self._options.devices, self._get_backend(config.backend))
        groups = read_groups(config)
        old, new = counts_by_kind(model.spec.instance_groups), counts_by_kind(groups)
        # Sequences live in the slots of their instances, and what keeps an order may know how many there are.
        fixed = model.spec.sequence is not None or definition.config.dynamic_batching.preserve_ordering
        if old != new if fixed else old.keys() != new.keys():
            return None
        spec = replace(
            model.spec,
            instance_groups=groups,
            config=to_json(config),
            config_message=config.SerializeToString(),
        )
        with self._families.used():
            return model.prepare_resize(spec, read_warmup(config, definition.directory))

    def _backend_of(self, config: ModelConfig) -> Backend:
        """Finds the model's backend; mistakes in a complete config are reported before a missing backend."""
        try:
            return self._get_backend(config.backend)
        except ConchError:
            if config.input and config.output:  # else the backend might have completed it
                raise_first(whole_problems(config, self._options.devices))
            raise

    def _finish(
        self, config: ModelConfig, backend: Backend, directory: Path, version: int
    ) -> tuple[ModelSpec, tuple[WarmupSample, ...]]:
        """Completes and checks a config, and reads the files it names."""
        backend_options = self._options.options_of(config.backend)
        version_directory = directory / str(version)
        model_file = result_or_raise(checked_model_file(config, backend, directory, version_directory))
        config.platform = config.platform or backend.platform
        if not self._options.strict_model_config:
            config = complete(config, backend, version_directory, backend_options)
            model_file = result_or_raise(checked_model_file(config, backend, directory, version_directory))
        normalize(config)
        validate_config(config)
        resolve_groups(config, self._options.devices, backend)
        validate_tensors(config)
        validate_ragged(config)
        check_supported(config)  # again, as the backend may have asked for more
        spec = build_spec(
            config, directory, version, model_file, backend_options, self._options.max_queue_size
        )
        return spec, read_warmup(config, directory)
