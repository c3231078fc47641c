"""Checks an ensemble's config, alone and against its composing models; rules and texts are Triton's.

`ensemble_problems` needs only the config; `plan_ensemble` needs the loaded models.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial

from conch.core.ensembles.plan import EnsemblePlan, ModelStep
from conch.core.spec import EnsembleScheduling, EnsembleStep, ModelSpec, TensorSpec
from conch.core.validation import shape_text
from conch.protocol.model_config_pb2 import ModelConfig, ModelEnsembling
from conch_control.config.problems import (
    Checked,
    Problem,
    Problems,
    attempt,
    entry_path,
    nearest,
    result_or_raise,
)

FindModel = Callable[[EnsembleStep], ModelSpec]
"""Returns the loaded model of a step."""


def ensemble_problems(config: ModelConfig) -> Problems:
    """Problems of an ensemble's config alone."""
    name = config.name
    if config.instance_group:
        yield Problem(
            "instance_group",
            f"instance group should not be specified for ensemble '{name}'",
            expected="nothing: its models have the instances",
        )
    if config.HasField("optimization"):
        yield Problem("optimization", f"optimization should not be specified for ensemble '{name}'")
    if config.model_warmup:
        yield Problem("model_warmup", f"model_warmup can not be specified for ensemble '{name}'")
    steps = config.ensemble_scheduling.step
    if not steps:
        yield Problem(
            "ensemble_scheduling.step", f"must specify 'step' for ensemble '{name}'", found="nothing"
        )
        return
    makers: dict[str, ModelEnsembling.Step] = {}
    inputs = {tensor.name for tensor in config.input}
    sound = True
    for number, step in enumerate(steps):
        for problem in _step_problems(name, number, step, makers, inputs):
            sound = False
            yield problem
        makers.update(dict.fromkeys(step.output_map.values(), step))
    if sound:  # else unconnected tensors are only a consequence
        yield from _connection_problems(config, makers)


def _step_problems(
    name: str,
    number: int,
    step: ModelEnsembling.Step,
    makers: Mapping[str, ModelEnsembling.Step],
    inputs: Collection[str],
) -> Problems:
    path = step_path(number)
    for field in ("model_name", "input_map", "output_map"):
        if not getattr(step, field):
            yield Problem(
                f"{path}.{field}",
                f"must specify '{field}' in step {number} of ensemble '{name}'",
                found="nothing",
            )
    own: set[str] = set()
    for end, tensor in step.output_map.items():
        if tensor in makers or tensor in own:
            yield Problem(
                entry_path(f"{path}.output_map", end),
                f"ensemble tensor '{tensor}' can appear in an output map only once for ensemble '{name}' "
                f"step {number}",
            )
        elif tensor in inputs:
            yield Problem(
                entry_path(f"{path}.output_map", end),
                f"ensemble tensor '{tensor}' is an input of ensemble '{name}' and can not appear in the "
                f"output map of step {number}",
            )
        own.add(tensor)


def step_path(number: int) -> str:
    """Path of a step."""
    return f"ensemble_scheduling.step[{number}]"


def _connection_problems(config: ModelConfig, makers: Mapping[str, ModelEnsembling.Step]) -> Problems:
    name = config.name
    consumed = {tensor for step in config.ensemble_scheduling.step for tensor in step.input_map.values()}
    for number, given in enumerate(config.input):
        if given.name not in consumed:
            yield Problem(
                f"input[{number}].name",
                f"ensemble input '{given.name}' for ensemble {name}' is not used",
                expected="the name of a tensor in an input_map",
                nearest=nearest(given.name, consumed - {*makers}),
            )
    made = {tensor.name for tensor in config.input}
    waiting = list(config.ensemble_scheduling.step)
    while ready := [step for step in waiting if made.issuperset(step.input_map.values())]:
        made.update(tensor for step in ready for tensor in step.output_map.values())
        waiting = [step for step in waiting if step not in ready]
    outputs = {tensor.name for tensor in config.output}
    for number, output in enumerate(config.output):
        if output.name not in made:
            yield Problem(
                f"output[{number}].name",
                _not_written(output.name, name, consumed, makers, made),
                expected="the name of a tensor that a step makes of tensors that are there",
                nearest=nearest(output.name, made - outputs),
            )
    for tensor in sorted({*makers, *consumed}):
        if tensor not in outputs and (tensor not in made or tensor not in consumed):
            known = {*made, *makers} - {tensor}
            yield Problem(
                _place(config, tensor),
                f"ensemble tensor '{tensor}' is unused in ensemble '{name}'",
                expected="a tensor that is an input or made by a step, and used by a step or an output",
                nearest="" if tensor in makers else nearest(tensor, known),
            )


def _place(config: ModelConfig, tensor: str) -> str:
    """Path of the first map entry that names a tensor."""
    for number, step in enumerate(config.ensemble_scheduling.step):
        for kind, mapping in (("input_map", step.input_map), ("output_map", step.output_map)):
            for end in sorted(mapping):
                if mapping[end] == tensor:
                    return entry_path(f"{step_path(number)}.{kind}", end)
    return "ensemble_scheduling"


def _not_written(
    output: str, ensemble: str, consumed: set[str], makers: Mapping[str, ModelEnsembling.Step], made: set[str]
) -> str:
    if output not in makers:
        if output not in consumed:
            return f"ensemble output '{output}' for ensemble {ensemble}' is not used"
        return f"output '{output}' for ensemble '{ensemble}' is not written"
    # Follow the inputs back to the first missing one, or around a cycle.
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
    """The ensemble's steps for the core; None for other models."""
    if not config.HasField("ensemble_scheduling"):
        return None
    return EnsembleScheduling(
        steps=tuple(
            EnsembleStep(step.model_name, step.model_version, dict(step.input_map), dict(step.output_map))
            for step in config.ensemble_scheduling.step
        ),
        max_inflight=config.ensemble_scheduling.max_inflight_requests,
    )


def plan_ensemble(spec: ModelSpec, find_model: FindModel) -> EnsemblePlan:
    """Checks an ensemble against its models, and plans its data flow.

    Raises:
        ConchError: A model is not loaded, or does not fit.
    """
    plan = result_or_raise(checked_plan(spec, find_model))
    assert plan is not None, "there was no problem"
    return plan


def checked_plan(spec: ModelSpec, find_model: FindModel) -> Checked[EnsemblePlan | None]:
    """The plan of an ensemble and its problems; None if it can't be planned."""
    scheduling = spec.ensemble
    assert scheduling is not None, "only for ensembles"
    models: list[ModelSpec | None] = []
    for number, step in enumerate(scheduling.steps):
        path = f"{step_path(number)}.model_name"
        models.append((yield from attempt(path, partial(find_model, step))))
    # The ensemble's own reshape applies between clients and models.
    tensors = {
        tensor.name: _Seen(spec, tensor, tensor.backend_dims) for tensor in (*spec.inputs, *spec.outputs)
    }
    sound = None not in models
    for number, (step, model) in enumerate(zip(scheduling.steps, models, strict=True)):
        if model is not None:
            for problem in _fit_problems(spec, number, step, model, tensors):
                sound = False
                yield problem
    if not sound:
        return None
    return (
        yield from attempt(
            "ensemble_scheduling",
            lambda: _plan(spec, scheduling, [model for model in models if model is not None]),
        )
    )


def _plan(spec: ModelSpec, scheduling: EnsembleScheduling, models: Iterable[ModelSpec]) -> EnsemblePlan:
    return EnsemblePlan(
        spec.name,
        [tensor.name for tensor in spec.inputs],
        [tensor.name for tensor in spec.outputs],
        [
            ModelStep(
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


def completed(spec: ModelSpec, plan: EnsemblePlan, find_model: FindModel) -> ModelSpec:
    """The spec with the labels of the composing models, where the ensemble has none."""
    assert spec.ensemble is not None, "only for ensembles"
    return replace(
        spec,
        outputs=tuple(_labelled(tensor, spec.ensemble, plan, find_model) for tensor in spec.outputs),
    )


def _pairs(tensors: Iterable[TensorSpec], mapping: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Model tensors with their ensemble tensors, in the order of the model's config."""
    return tuple((tensor.name, mapping[tensor.name]) for tensor in tensors if tensor.name in mapping)


class _Seen:
    """An ensemble tensor as first described, by the ensemble or by a model."""

    def __init__(self, model: ModelSpec, tensor: TensorSpec, dims: tuple[int, ...]) -> None:
        self.model = model
        self.tensor = tensor
        self.dims = dims
        self.full = (-1, *dims) if model.max_batch_size > 0 else dims


def _fit_problems(
    ensemble: ModelSpec, number: int, step: EnsembleStep, model: ModelSpec, tensors: dict[str, _Seen]
) -> Problems:
    name, path = ensemble.name, step_path(number)
    if 0 < model.max_batch_size < ensemble.max_batch_size:
        yield Problem(
            "max_batch_size",
            f"ensemble {name} allows maximum batch size {ensemble.max_batch_size}, but it contains model "
            f"{model.name} which only allows maximum batch size to be {model.max_batch_size}",
            expected=f"at most {model.max_batch_size}",
        )
    inputs = {tensor.name: tensor for tensor in model.inputs}
    outputs = {tensor.name: tensor for tensor in model.outputs}
    for end, tensor in step.input_map.items():
        if end not in inputs:
            yield Problem(
                entry_path(f"{path}.input_map", end),
                f"in ensemble {name}, ensemble tensor {tensor} is mapping to non-existing input {end} in "
                f"model {model.name}",
                expected=f"an input of {model.name}: {', '.join(inputs)}",
                found=f"'{end}'",
                nearest=nearest(end, inputs),
            )
    for end, spec in inputs.items():
        if end not in step.input_map and not spec.optional:
            yield Problem(
                f"{path}.input_map",
                f"in ensemble {name}, input {end} in model {model.name} is not mapped to any ensemble "
                f"tensors",
                expected=f"an entry with the key '{end}'",
                found=", ".join(f"'{key}'" for key in step.input_map),
            )
    for end, tensor in step.output_map.items():
        if end not in outputs:
            yield Problem(
                entry_path(f"{path}.output_map", end),
                f"in ensemble {name}, ensemble tensor {tensor} is mapped from non-existing output {end} in "
                f"model {model.name}",
                expected=f"an output of {model.name}: {', '.join(outputs)}",
                found=f"'{end}'",
                nearest=nearest(end, outputs),
            )
    for where, mapping, ends in (
        ("input_map", step.input_map, inputs),
        ("output_map", step.output_map, outputs),
    ):
        for end, tensor in mapping.items():
            if end in ends:
                seen = _Seen(model, ends[end], ends[end].dims)
                yield from _consistency_problems(
                    name, entry_path(f"{path}.{where}", end), tensor, tensors.setdefault(tensor, seen), seen
                )


def _consistency_problems(ensemble: str, path: str, tensor: str, one: _Seen, other: _Seen) -> Problems:
    if one.tensor.datatype != other.tensor.datatype:
        yield Problem(
            path,
            f"in ensemble {ensemble}, ensemble tensor {tensor}: inconsistent data type: {_type_name(one)} is "
            f"inferred from model {one.model.name} while {_type_name(other)} is inferred from model "
            f"{other.model.name}",
            expected=_type_name(one),
            found=_type_name(other),
        )
    # Shapes may agree with the batch dimension if one model has it in its dims.
    elif not (_agree(one.dims, other.dims) or _agree(one.full, other.full)):
        yield Problem(
            path,
            f"in ensemble {ensemble}, ensemble tensor {tensor}: inconsistent shape: {shape_text(one.full)} "
            f"is inferred from model {one.model.name} while {shape_text(other.full)} is inferred from model "
            f"{other.model.name}",
            expected=shape_text(one.full),
            found=shape_text(other.full),
        )


def _agree(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return len(one) == len(other) and all(a == b or -1 in (a, b) for a, b in zip(one, other, strict=True))


def _type_name(seen: _Seen) -> str:
    return "TYPE_STRING" if seen.tensor.datatype == "BYTES" else f"TYPE_{seen.tensor.datatype}"


def _labelled(
    tensor: TensorSpec, scheduling: EnsembleScheduling, plan: EnsemblePlan, find_model: FindModel
) -> TensorSpec:
    made = plan.maker(tensor.name)
    if tensor.labels or made is None:
        return tensor
    step, output = made
    model = find_model(scheduling.steps[step.number])
    labels = next((made.labels for made in model.outputs if made.name == output), ())
    return replace(tensor, labels=labels)
