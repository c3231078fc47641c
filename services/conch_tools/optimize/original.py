"""The source in its own framework: its signature, the samples, its answers to them, and their noise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from conch.core.errors import InternalError
from conch_tools.optimize.digests import digest_of_array, digest_of_facts
from conch_tools.optimize.judging import noise_of
from conch_tools.optimize.model_kinds import Source
from conch_tools.optimize.model_signature import ModelSignature
from conch_tools.optimize.options import OptimizeOptions
from conch_tools.optimize.sample_data import fitted, random_samples, read_arrays, read_json
from conch_tools.optimize.step_environments import StepEnvironment, StepEnvironments
from conch_tools.optimize.step_processes import ProcessFailedError
from conch_tools.optimize.step_runner import LOG, StepRunner, digest_of_function, step_job
from conch_tools.optimize.step_table import OPENERS
from conch_tools.optimize.steps.step_main import save_arrays
from conch_tools.whole_files import write_whole

Array = npt.NDArray[Any]
RANDOM = "random"
"""The origin of samples that the user has not given."""

_ANSWERS_FORMAT = 1
_SINGLE_ROWS = 32


@dataclass(frozen=True, slots=True)
class Original:
    """Original model, with which candidates are compared.

    Attributes:
        batch: Samples in the largest batch; 0 without a batch dimension.
        rows: Number of samples.
        origin: Origin of the samples.
        sample: One sample by input.
        samples_file: All of them.
        samples_digest: Their hash.
        answers: By output, for all samples.
        noise: Largest difference of several runs, by output.
    """

    source: Source
    signature: ModelSignature
    batch: int
    rows: int
    origin: str
    sample: Mapping[str, Array]
    samples_file: Path
    samples_digest: str
    answers: Mapping[str, Array]
    noise: Mapping[str, float]

    @property
    def sizes(self) -> list[int]:
        """Batch sizes to judge, the one with all samples first; 0 without a batch dimension."""
        return [self.batch, *(size for size in (1, 2) if size < self.batch)]


def run_original(
    source: Source,
    folder: Path,
    options: OptimizeOptions,
    served_samples: Mapping[str, Array],
    environments: StepEnvironments,
    progress: Callable[[str], None],
) -> Original:
    """Runs the source in its own framework: all samples twice, and some of them one by one.

    Raises:
        ConchError: It can't be run, or the samples do not suit it.
    """
    opener = OPENERS[source.kind.name]
    environment = environments.find(source.kind.target, opener.requires)
    work = folder / "reference"
    work.mkdir(exist_ok=True)
    arrays = read_arrays(options.data) if options.data else served_samples
    if arrays:
        save_arrays(work / "given.npz", arrays)
    job = step_job("open", opener.function, source.path, {"batching": None}, 1)
    job["options"] = {"function": source.function, "batching": options.batching, "run": False}
    job["samples"] = str(work / "given.npz") if arrays else ""
    runner = StepRunner(options.step_timeout_s)
    facts = _run(source, work, job, environment, runner)
    signature = ModelSignature.of(facts).with_dims()
    aliases: Mapping[str, str] = facts.get("aliases", {})
    arrays = {aliases.get(name, name): array for name, array in arrays.items()}
    samples, origin = _samples(arrays, signature, options)
    if opener.float32:
        samples = {name: _rounded(array) for name, array in samples.items()}
    rows = len(next(iter(samples.values())))
    batch = min(options.max_batch_size, rows) if signature.batching else 0
    samples_file = folder / "samples.npz"
    save_arrays(samples_file, samples)
    samples_digest = digest_of_facts({name: digest_of_array(array) for name, array in samples.items()})

    function = digest_of_function(opener.function)
    facts_of_answers = [source.digest, source.function, function, environment.packages, samples_digest, batch]
    key, note = digest_of_facts([_ANSWERS_FORMAT, *facts_of_answers]), work / "key.txt"
    if not (note.is_file() and note.read_text() == key):
        progress(f"runs {rows} samples in {source.kind.target}")
        note.unlink(missing_ok=True)
        job |= {"batch": batch, "samples": str(samples_file)}
        job["options"] |= {"run": True, "single_rows": _SINGLE_ROWS}
        _run(source, work, job, environment, runner)
        write_whole(note, key)
    first, *others = [_answers(work / f"{name}.npz") for name in ("first", "second", "single")]
    return Original(
        source=source,
        signature=signature,
        batch=batch,
        rows=rows,
        origin=origin,
        sample={name: array[0] for name, array in samples.items()},
        samples_file=samples_file,
        samples_digest=samples_digest,
        answers=first,
        noise=noise_of(first, others),
    )


def _run(
    source: Source, work: Path, job: dict[str, Any], environment: StepEnvironment, runner: StepRunner
) -> dict[str, Any]:
    try:
        return runner.run(work, job, environment)
    except ProcessFailedError as error:
        raise InternalError(
            f"'{source.path}' can't be run in {source.kind.target}: {error}; {work / LOG} has the output"
        ) from error


def _samples(
    arrays: Mapping[str, Array], signature: ModelSignature, options: OptimizeOptions
) -> tuple[dict[str, Array], str]:
    """The samples, and their origin."""
    if options.data is not None:
        arrays = arrays or read_json(options.data, signature)
        return fitted(arrays, signature, f"--data '{options.data}'"), str(options.data)
    if arrays:
        origin = "the model's warm-up data"
        return fitted(arrays, signature, origin), origin
    return fitted(random_samples(signature, options.shapes), signature, RANDOM), RANDOM


def _answers(path: Path) -> dict[str, Array]:
    """Outputs of a run, with the dimension that configs have for outputs of one value."""
    with np.load(path, allow_pickle=False) as arrays:
        found = {name: arrays[name] for name in arrays.files}
    return {name: array[:, None] if array.ndim == 1 else array for name, array in found.items()}


def _rounded(array: Array) -> Array:
    """Floats rounded to FP32."""
    return array.astype(np.float32).astype(array.dtype) if array.dtype.kind == "f" else array
