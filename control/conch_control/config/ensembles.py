"""Checks an ensemble's config: by itself, and against the models it is made of; rules and texts are Triton's.

`validate_ensemble` needs nothing but the config. `plan_ensemble` needs the models, so it comes when they have
been loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

from conch.core.ensemble.plan import Plan, Step
from conch.core.errors import InvalidArgumentError
from conch.core.spec import EnsembleScheduling, EnsembleStep, ModelSpec, TensorSpec
from conch.core.validation import shape_text
from conch.protocol.model_config_pb2 import ModelConfig, ModelEnsembling

FindModel = Callable[[EnsembleStep], ModelSpec]
"""The model of a step as it is loaded now."""


def validate_ensemble(config: ModelConfig) -> None:
    """Checks what an ensemble's config says by itself.

    Raises:
        InvalidArgumentError: It breaks a rule.
    """
    name = config.name
    if config.instance_group:
        raise InvalidArgumentError(f"instance group should not be specified for ensemble '{name}'")
    if config.HasField("optimization"):
        raise InvalidArgumentError(f"optimization should not be specified for ensemble '{name}'")
    if config.model_warmup:
        raise InvalidArgumentError(f"model_warmup can not be specified for ensemble '{name}'")
    steps = config.ensemble_scheduling.step
    if not steps:
        raise InvalidArgumentError(f"must specify 'step' for ensemble '{name}'")
    makers: dict[str, ModelEnsembling.Step] = {}
    inputs = {tensor.name for tensor in config.input}
    for number, step in enumerate(steps):
        for field in ("model_name", "input_map", "output_map"):
            if not getattr(step, field):
                raise InvalidArgumentError(f"must specify '{field}' in step {number} of ensemble '{name}'")
        for tensor in step.output_map.values():
            if tensor in makers:
                raise InvalidArgumentError(
                    f"ensemble tensor '{tensor}' can appear in an output map only once for ensemble "
                    f"'{name}' step {number}"
                )
            if tensor in inputs:
                raise InvalidArgumentError(
                    f"ensemble tensor '{tensor}' is an input of ensemble '{name}' and can not appear in the "
                    f"output map of step {number}"
                )
            makers[tensor] = step
    _check_connections(config, makers)


def _check_connections(config: ModelConfig, makers: Mapping[str, ModelEnsembling.Step]) -> None:
    name = config.name
    consumed = {tensor for step in config.ensemble_scheduling.step for tensor in step.input_map.values()}
    for given in config.input:
        if given.name not in consumed:
            raise InvalidArgumentError(f"ensemble input '{given.name}' for ensemble {name}' is not used")
    made = {tensor.name for tensor in config.input}
    waiting = list(config.ensemble_scheduling.step)
    while ready := [step for step in waiting if made.issuperset(step.input_map.values())]:
        made.update(tensor for step in ready for tensor in step.output_map.values())
        waiting = [step for step in waiting if step not in ready]
    outputs = {tensor.name for tensor in config.output}
    for output in config.output:
        if output.name not in made:
            raise InvalidArgumentError(_not_written(output.name, name, consumed, makers, made))
    for tensor in sorted({*makers, *consumed}):
        if tensor not in outputs and (tensor not in made or tensor not in consumed):
            raise InvalidArgumentError(f"ensemble tensor '{tensor}' is unused in ensemble '{name}'")


def _not_written(
    output: str,
    ensemble: str,
    consumed: set[str],
    makers: Mapping[str, ModelEnsembling.Step],
    made: set[str],
) -> str:
    if output not in makers:
        if output not in consumed:
            return f"ensemble output '{output}' for ensemble {ensemble}' is not used"
        return f"output '{output}' for ensemble '{ensemble}' is not written"
    # As far back as it goes, or until it turns in a circle.
    missing = output
    followed: set[str] = set()
    while missing in makers and missing not in followed:
        followed.add(missing)
        inputs = sorted(makers[missing].input_map.values())
        missing = next((tensor for tensor in inputs if tensor not in (*made, *followed)), missing)
    return (
        f"output '{output}' for ensemble '{ensemble}' is not written: at least one of its depending tensors, "
        f"'{missing}', is not connected"
    )


def scheduling_of(config: ModelConfig) -> EnsembleScheduling | None:
    """The ensemble's steps as the core has them; None for a config that is not an ensemble's."""
    if not config.HasField("ensemble_scheduling"):
        return None
    return EnsembleScheduling(
        steps=tuple(
            EnsembleStep(step.model_name, step.model_version, dict(step.input_map), dict(step.output_map))
            for step in config.ensemble_scheduling.step
        ),
        max_inflight=config.ensemble_scheduling.max_inflight_requests,
    )


def plan_ensemble(spec: ModelSpec, find_model: FindModel) -> Plan:
    """Checks an ensemble against its models, and plans how tensors go through it.

    Raises:
        ConchError: A model is not loaded, or does not fit the others.
    """
    scheduling = spec.ensemble
    assert scheduling is not None, "only for ensembles"
    models = [find_model(step) for step in scheduling.steps]
    # The ensemble's own reshape lies between its clients and its models.
    tensors = {
        tensor.name: _Seen(spec, tensor, tensor.backend_dims) for tensor in (*spec.inputs, *spec.outputs)
    }
    for step, model in zip(scheduling.steps, models, strict=True):
        _check_model(spec, step, model, tensors)
    return Plan(
        spec.name,
        [tensor.name for tensor in spec.inputs],
        [tensor.name for tensor in spec.outputs],
        [
            Step(
                number,
                step.model_name,
                "" if step.model_version < 0 else str(step.model_version),
                _pairs(model.inputs, step.input_map),
                _pairs(model.outputs, step.output_map),
                model.decoupled,
            )
            for number, (step, model) in enumerate(zip(scheduling.steps, models, strict=True))
        ],
        scheduling.max_inflight,
    )


def completed(spec: ModelSpec, plan: Plan, find_model: FindModel) -> ModelSpec:
    """An ensemble's spec with what its models say: its outputs' labels, where it has none of its own."""
    assert spec.ensemble is not None, "only for ensembles"
    return replace(
        spec,
        outputs=tuple(_labelled(tensor, spec.ensemble, plan, find_model) for tensor in spec.outputs),
    )


def _pairs(tensors: Iterable[TensorSpec], mapping: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """A model's tensors with those of the ensemble, in the order of the model's config."""
    return tuple((tensor.name, mapping[tensor.name]) for tensor in tensors if tensor.name in mapping)


class _Seen:
    """A tensor of an ensemble as the first that has to do with it describes it."""

    def __init__(self, model: ModelSpec, tensor: TensorSpec, dims: tuple[int, ...]) -> None:
        self.model = model
        self.tensor = tensor
        self.dims = dims
        self.full = (-1, *dims) if model.max_batch_size > 0 else dims


def _check_model(
    ensemble: ModelSpec, step: EnsembleStep, model: ModelSpec, tensors: dict[str, _Seen]
) -> None:
    name = ensemble.name
    if 0 < model.max_batch_size < ensemble.max_batch_size:
        raise InvalidArgumentError(
            f"ensemble {name} allows maximum batch size {ensemble.max_batch_size}, but it contains model "
            f"{model.name} which only allows maximum batch size to be {model.max_batch_size}"
        )
    inputs = {tensor.name: tensor for tensor in model.inputs}
    outputs = {tensor.name: tensor for tensor in model.outputs}
    for end, tensor in step.input_map.items():
        if end not in inputs:
            raise InvalidArgumentError(
                f"in ensemble {name}, ensemble tensor {tensor} is mapping to non-existing input {end} in "
                f"model {model.name}"
            )
    for end, spec in inputs.items():
        if end not in step.input_map and not spec.optional:
            raise InvalidArgumentError(
                f"in ensemble {name}, input {end} in model {model.name} is not mapped to any ensemble tensors"
            )
    for end, tensor in step.output_map.items():
        if end not in outputs:
            raise InvalidArgumentError(
                f"in ensemble {name}, ensemble tensor {tensor} is mapped from non-existing output {end} in "
                f"model {model.name}"
            )
    for tensor, spec in _ends(step, inputs, outputs):
        seen = _Seen(model, spec, spec.dims)
        _check_consistent(name, tensor, tensors.setdefault(tensor, seen), seen)


def _ends(
    step: EnsembleStep, inputs: Mapping[str, TensorSpec], outputs: Mapping[str, TensorSpec]
) -> Iterator[tuple[str, TensorSpec]]:
    for end, tensor in step.input_map.items():
        yield tensor, inputs[end]
    for end, tensor in step.output_map.items():
        yield tensor, outputs[end]


def _check_consistent(ensemble: str, tensor: str, one: _Seen, other: _Seen) -> None:
    if one.tensor.datatype != other.tensor.datatype:
        raise InvalidArgumentError(
            f"in ensemble {ensemble}, ensemble tensor {tensor}: inconsistent data type: "
            f"{_type_name(one)} is inferred from model {one.model.name} while "
            f"{_type_name(other)} is inferred from model {other.model.name}"
        )
    # With the batch dimension they may agree where one of the models has it among its dims.
    if not (_agree(one.dims, other.dims) or _agree(one.full, other.full)):
        raise InvalidArgumentError(
            f"in ensemble {ensemble}, ensemble tensor {tensor}: inconsistent shape: "
            f"{shape_text(one.full)} is inferred from model {one.model.name} while "
            f"{shape_text(other.full)} is inferred from model {other.model.name}"
        )


def _agree(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return len(one) == len(other) and all(a == b or -1 in (a, b) for a, b in zip(one, other, strict=True))


def _type_name(seen: _Seen) -> str:
    return "TYPE_STRING" if seen.tensor.datatype == "BYTES" else f"TYPE_{seen.tensor.datatype}"


def _labelled(
    tensor: TensorSpec, scheduling: EnsembleScheduling, plan: Plan, find_model: FindModel
) -> TensorSpec:
    made = plan.maker(tensor.name)
    if tensor.labels or made is None:
        return tensor
    step, output = made
    model = find_model(scheduling.steps[step.number])
    labels = next((made.labels for made in model.outputs if made.name == output), ())
    return replace(tensor, labels=labels)
