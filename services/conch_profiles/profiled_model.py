"""A model version whose requests are profiled; models without a profile pay nothing for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from conch.core.request import InferenceRequest
from conch.core.servable import InlineClaim, Servable
from conch.core.servable_wrapper import ServableWrapper
from conch_profiles.profiler import Profiler

if TYPE_CHECKING:  # needs datasketches
    from conch_profiles.input_profile import InputProfile


class ProfiledModel(ServableWrapper):
    """A model version, before its response cache.

    Args:
        model: The model.
        profile: Takes samples of its requests.
        profiler: Counts them.

    Attributes:
        profile: As given.
    """

    def __init__(self, model: Servable, profile: InputProfile, profiler: Profiler) -> None:
        super().__init__(model)
        self.profile = profile
        self._profiler = profiler

    def submit(self, request: InferenceRequest, may_claim: bool = False) -> InlineClaim | None:
        """Serves a request, and keeps a sample of it; see `Servable.submit`."""
        profile = self.profile
        if not profile.is_open:
            return self.model.submit(request, may_claim)
        # First: the model may write to its inputs, and clients to their regions once they have an answer.
        sample = profile.sample(request.inputs)
        claim = self.model.submit(request, may_claim)
        if sample is not None and profile.add(sample):
            self._profiler.count_soon(profile)
        return claim


def profile_of(model: Servable | None) -> InputProfile | None:
    """The profile of a version that serves; None without one."""
    return model.profile if isinstance(model, ProfiledModel) else None
