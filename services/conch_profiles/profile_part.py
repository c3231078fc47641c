"""Input profiles as a part of the server: wraps the versions that are profiled, and shows their metrics."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import ClassVar

from conch.core.errors import InvalidArgumentError, UnsupportedError
from conch.core.registry import Registry
from conch.core.servable import Servable
from conch.observability.metrics.metric_families import Family
from conch.parts.server_part import PartContext, ServerPart
from conch_profiles.profile_metrics import profile_families
from conch_profiles.profile_settings import (
    MISSING,
    PROFILE_PARAMETER,
    ProfileOptions,
    is_installed,
    problem_of,
)
from conch_profiles.profiled_model import ProfiledModel
from conch_profiles.profiler import Profiler

log = logging.getLogger(__name__)


class ProfilePart(ServerPart):
    """Profiles inputs.

    Args:
        options: Its options.
        registry: The models that serve.
    """

    before_models: ClassVar[bool] = True

    def __init__(self, options: ProfileOptions, registry: Registry) -> None:
        self._options = options
        self._registry = registry
        self._profiler = Profiler()

    def start(self) -> None:
        """Starts nothing: the thread starts with the first version that is profiled."""

    def wrap(self, model: Servable) -> Servable:
        """Wraps a loaded version if its inputs are to be profiled.

        Raises:
            InvalidArgumentError: Its config asks for a profile, and it has no columns.
            UnsupportedError: datasketches is not installed.
        """
        spec = model.spec
        wanted = spec.parameters.get(PROFILE_PARAMETER)
        if wanted is None and (not self._options.by_default or spec.decoupled):
            return model
        if problem := problem_of(wanted):
            raise InvalidArgumentError(f"model '{spec.name}': {problem}")
        if wanted == "false":
            return model
        from conch_frames.interface import interface_of

        columns = interface_of(spec).columns
        if not columns.rules:
            if wanted is None:
                return model
            raise InvalidArgumentError(
                f"model '{spec.name}': parameter '{PROFILE_PARAMETER}' is true, and no input is a column or "
                f"has names of columns: remove it, or name the columns in CONCH_COLUMNS"
            )
        if not is_installed():
            raise UnsupportedError(f"model '{spec.name}': {MISSING}")
        from conch_profiles.input_profile import InputProfile
        from conch_profiles.training_profile import FILE_NAME, TrainingFileError, read_training

        training, note = None, ""
        try:
            training = read_training(spec.version_directory / FILE_NAME)
            if training is None:
                note = f"no {FILE_NAME} in the version's directory"
        except TrainingFileError as error:
            note = str(error)
            log.warning("model '%s' version %d: %s", spec.name, spec.version, note)
        profile = InputProfile(columns, training, note, self._options.window_s)
        self._profiler.start()
        return ProfiledModel(model, profile, self._profiler)

    def families(self) -> Sequence[tuple[Family, list[str]]]:
        """The figures of all profiles."""
        return profile_families(self._registry)

    def close(self, grace_s: float) -> bool:
        """Ends the thread; True if it ended in time."""
        return self._profiler.close(grace_s)


def profile_parts(options: ProfileOptions, context: PartContext) -> Sequence[ServerPart]:
    """The part, for the entry-point group ``conch.parts``; wraps the versions that are loaded from now on."""
    part = ProfilePart(options, context.core.state.registry)
    context.control.agent.wrap_versions(part.wrap)
    return [part]
