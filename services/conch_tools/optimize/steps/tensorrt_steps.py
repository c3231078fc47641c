"""Steps of TensorRT, on NVIDIA GPUs. No test has run them: conch's tests have no GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from conch_tools.optimize.steps.step_main import Job

_FILE = "model.plan"


def build(job: Job) -> None:
    """Builds an engine with the types of the ONNX model."""
    _build(job)


def build_bf16(job: Job) -> None:
    """Builds an engine that may compute in bfloat16."""
    _build(job, "BF16")


def _build(job: Job, precision: str = "") -> None:
    """Builds an engine with one optimisation profile: the optimum is the largest batch."""
    import tensorrt

    logger = tensorrt.Logger(tensorrt.Logger.WARNING)
    builder = tensorrt.Builder(logger)
    # Newer versions know no other networks, and no flag.
    typed = getattr(tensorrt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    network = builder.create_network(0 if precision or typed is None else 1 << int(typed))
    parser = tensorrt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(job.source)):
        raise ValueError("; ".join(str(parser.get_error(number)) for number in range(parser.num_errors)))
    config = builder.create_builder_config()
    if precision:
        config.set_flag(getattr(tensorrt.BuilderFlag, precision))
    profile = builder.create_optimization_profile()
    for number in range(network.num_inputs):
        given = network.get_input(number)
        sizes = (1, job.batch, job.batch) if job.batch else (0, 0, 0)
        profile.set_shape(given.name, *(_shape(given, job, size) for size in sizes))
    config.add_optimization_profile(profile)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise ValueError("TensorRT could not build an engine; the log has its messages")
    (job.folder / _FILE).write_bytes(bytes(plan))


def _shape(given: Any, job: Job, batch: int) -> tuple[int, ...]:
    """The shape of an input for a batch size; the samples tell variable dims."""
    array = job.samples()[given.name]
    return (batch, *array.shape[1:]) if job.batch else array.shape[1:]
