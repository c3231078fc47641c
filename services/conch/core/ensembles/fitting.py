"""Between an ensemble and its models: requests for steps, and tensors with the dimensions each side expects.

A model that batches expects a batch dimension that one without batching does not have. Where a tensor goes
from one kind to the other, and has one dimension less than expected, it becomes a batch of one; a batch of
one loses that dimension. A batch of several stays as it is, for a model that has it among its own dims.
"""

from __future__ import annotations

from collections.abc import Mapping

from conch.core.admission import Admission
from conch.core.ensembles.flow import Run
from conch.core.ensembles.plan import Plan
from conch.core.errors import DeadlineExceededError, UnavailableError
from conch.core.request import InferenceRequest, Responder
from conch.core.servable import Servable
from conch.core.spec import ModelSpec
from conch.core.tensor import Tensor


def fitted(tensor: Tensor, name: str, rank: int, batches: bool) -> Tensor:
    """A tensor under another name, with or without a batch dimension as is expected.

    Args:
        tensor: The tensor.
        name: The new name.
        rank: Number of dimensions expected, the batch dimension included.
        batches: Whether the first of them is the batch.
    """
    shape = tensor.shape
    if batches and len(shape) == rank - 1:
        shape = (1, *shape)
    elif not batches and len(shape) == rank + 1 and shape[0] == 1:
        shape = shape[1:]
    return tensor.renamed(name, shape)


class _Side:
    """What one version of a step's model expects."""

    __slots__ = ("batches", "outputs", "ranks", "spec")

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.batches = spec.max_batch_size > 0
        self.ranks: Mapping[str, int] = {
            tensor.name: len(tensor.dims) + self.batches for tensor in spec.inputs
        }
        self.outputs = frozenset(tensor.name for tensor in spec.outputs)


class Fitting:
    """Makes the requests of an ensemble's steps.

    Args:
        plan: The ensemble.
        admission: Resolves its models.
    """

    def __init__(self, plan: Plan, admission: Admission) -> None:
        self._plan = plan
        self._admission = admission
        self._sides: dict[int, _Side] = {}

    def __call__(
        self, request: InferenceRequest, run: Run, responder: Responder, now_ns: int
    ) -> tuple[InferenceRequest, Servable]:
        """The request of a step, and the model it is for.

        Raises:
            ConchError: There is no such model now, or not one that the ensemble can use; or time is up.
        """
        if request.deadline_ns is not None and now_ns >= request.deadline_ns:
            raise DeadlineExceededError("Deadline Exceeded")
        step = run.step
        child = InferenceRequest(
            step.model_name, step.version, {}, responder, now_ns, request.id, None, request.parameters
        )
        child.responses_wait = True
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
