"""From a request to the model version that serves it: the way in for front ends and for ensembles."""

from __future__ import annotations

from conch.core.errors import UnavailableError
from conch.core.registry import Registry, parse_version
from conch.core.request import InferenceRequest
from conch.core.servable import ClosedError, Leadable, Servable


class Dispatcher:
    """Hands requests to the models of a registry.

    Args:
        registry: The models.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def find(self, request: InferenceRequest) -> Servable:
        """The model for a request: the one that has begun its sequence, also if it is being replaced.

        Raises:
            ConchError: There is no such model; see `Registry.resolve`.
        """
        registry = self._registry
        if registry.draining and request.correlation_id and not request.sequence_start:
            model = self._draining(request)
            if model is not None:
                return model
        return registry.resolve(request.model_name, request.model_version)

    def leaving(self, request: InferenceRequest) -> Servable | None:
        """The version for a request that is being unloaded and that requests of ensembles still need.

        For these only: for everybody else it is gone, as `find` says.
        """
        models = self._registry.draining_of(request.model_name)
        number = parse_version(request.model_version)
        fitting = [model for model in models if number in (-1, model.spec.version)]
        # The last to go; of versions that went together, the one that was the newest.
        return max(reversed(fitting), key=lambda model: model.spec.version, default=None)

    def submit(
        self, request: InferenceRequest, may_lead: bool = False, model: Servable | None = None
    ) -> Leadable | None:
        """Runs a request; its responder gets every outcome except those raised here.

        Args:
            request: The request.
            may_lead: Whether the caller is willing to run batches soon.
            model: The model that `find` gave for it, if the caller has looked it up.

        Returns:
            What the caller has to lead or hand over soon, only if it may lead; else None.

        Raises:
            ConchError: There is no such model, or the request does not fit it.
        """
        while True:
            if model is None:
                model = self.find(request)
            try:
                return model.submit(request, may_lead)
            except ClosedError:
                # Replaced between the look-up and the call: its successor is published before it
                # closes, so looking again finds that, or says that the model is gone.
                decoupled = model.spec.decoupled
                model = self.find(request)
                if model.spec.decoupled is not decoupled:
                    # The caller has made up its mind how to answer by what it knew of the old one.
                    raise UnavailableError(
                        f"model '{request.model_name}' has become {'' if decoupled is False else 'not '}"
                        f"decoupled while the request came in; send it again"
                    ) from None

    def cancel(self, request: InferenceRequest) -> None:
        """Says that nobody waits for a request any more."""
        if request.model is not None:
            request.model.cancel(request)
        else:
            request.cancelled = True

    def _draining(self, request: InferenceRequest) -> Servable | None:
        """A version that is being replaced or unloaded and has the request's sequence."""
        models = self._registry.draining_of(request.model_name)
        if not models:
            return None
        number = parse_version(request.model_version)
        known = self._registry.identifiers(request.model_name)
        entry = self._registry.entries.get(known[0]) if len(known) == 1 else None
        ready = None if entry is None else entry.latest if number < 0 else entry.ready.get(number)
        if ready is not None and ready.continues(request):
            return None  # its id has been used again since
        for model in reversed(models):
            if number in (-1, model.spec.version) and model.continues(request):
                return model
        return None
