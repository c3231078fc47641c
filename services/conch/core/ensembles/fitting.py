"""Makes the requests of an ensemble's steps, and adds or removes the batch dimension of their tensors.

A model with batching expects a batch dimension that one without does not have. A tensor with one dimension
less than expected becomes a batch of one; a batch of one loses that dimension. Larger batches stay as they
are, for a model that has the batch among its own dims.
"""

from __future__ import annotations

from collections.abc import Mapping

from conch.core.admission import Admission
from conch.core.ensembles.flow import Run
from conch.core.ensembles.plan import EnsemblePlan
from conch.core.errors import DeadlineExceededError, UnavailableError
from conch.core.request import InferenceRequest, Responder
from conch.core.servable import Servable
from conch.core.spec import ModelSpec
from conch.core.tensor import Tensor


def fitted(tensor: Tensor, name: str, rank: int, batches: bool) -> Tensor:
    """Renames a tensor, and adds or removes its batch dimension to match `rank`.

    Args:
        tensor: The tensor.
        name: The new name.
        rank: Expected number of dimensions, with the batch dimension.
        batches: True if the first of them is the batch.
    """
    shape = tensor.shape
    if batches and len(shape) == rank - 1:
        shape = (1, *shape)
    elif not batches and len(shape) == rank + 1 and shape[0] == 1:
        shape = shape[1:]
    return tensor.renamed(name, shape)


class _Side:
    """The inputs and outputs of a step's model version."""

    __slots__ = ("batches", "outputs", "ranks", "spec")

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.batches = spec.max_batch_size > 0
        self.ranks: Mapping[str, int] = {
            tensor.name: len(tensor.dims) + self.batches for tensor in spec.inputs
        }
        self.outputs = frozenset(tensor.name for tensor in spec.outputs)


class Fitting:
    """Makes the requests of an ensemble's steps; `admission` resolves their models."""

    def __init__(self, plan: EnsemblePlan, admission: Admission) -> None:
        self._plan = plan
        self._admission = admission
        self._sides: dict[int, _Side] = {}

    def __call__(
        self, request: InferenceRequest, run: Run, responder: Responder, now_ns: int
    ) -> tuple[InferenceRequest, Servable]:
        """Makes the request of a step; returns it with its model.

        Raises:
            ConchError: The model is missing or has changed its kind, or the deadline has passed.
        """
        if request.deadline_ns is not None and now_ns >= request.deadline_ns:
            raise DeadlineExceededError("Deadline Exceeded")
        step = run.step
        child = InferenceRequest(
            step.model_name, step.version, {}, responder, now_ns, request.id, None, request.parameters
        )
        child.responses_wait = True
        child.reader = request
        child.priority = request.priority
        child.timeout_us = request.timeout_us
        child.correlation_id, child.sequence_start, child.sequence_end = run.correlation
        child.deadline_ns = request.deadline_ns
        model = self._admission.resolve_step(child)
        side = self._sides.get(step.number)
        if side is None or side.spec is not model.spec:
            side = self._sides[step.number] = self._side(run, model.spec)
        ranks = side.ranks
        child.inputs = {
            name: fitted(tensor, name, ranks.get(name, len(tensor.shape)), side.batches)
            for name, tensor in run.inputs.items()
        }
        if len(run.wanted) != len(side.outputs):
            child.requested = tuple(output for output, _ in run.wanted)
        return child, model

    def _side(self, run: Run, spec: ModelSpec) -> _Side:
        if spec.decoupled is not run.step.decoupled:
            raise UnavailableError(
                f"model '{spec.name}' has become {'' if spec.decoupled else 'not '}decoupled since the "
                f"ensemble was loaded; load ensemble '{self._plan.name}' again"
            )
        return _Side(spec)
