"""Contract of every engine, whatever its format: answers, batching, errors, loading and unloading."""

from __future__ import annotations

import gc
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.backend_harness import Harness, HarnessAnswer, one_batch
from tests.support.engines import ENGINES, missing_packages
from tests.support.engines.engine import WIDTH, Engine, sample_rows
from tests.support.engines.engine_models import spec_of, version_of
from tests.support.servers import client_of, eventually, serving, tensor

from conch.backends import load_backend
from conch.core.errors import ConchError
from conch.core.model_version import Model
from conch.core.request import InferenceRequest
from conch.core.spec import DynamicBatching, InstanceGroup, TensorSpec, WarmupInput, WarmupSample
from conch.core.tensor import ELEMENT_SIZES, Array, Tensor, encode_bytes
from conch_control.config.model_spec import build_spec
from conch_control.config.parse import parse_config
from conch_control.config.platforms import complete
from conch_control.config.problems import raise_first
from conch_control.config.validate import config_problems, tensor_problems

ROWS = 8
RAMP_UP, CYCLES = 30, 100
SOURCE = re.compile(r"\.(?:cc|cpp|h|hpp)\b")
"""A file of an engine's sources."""


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    harness = Harness(tmp_path)
    yield harness
    harness.close()


def test_any_split_of_rows_into_requests(engine: Engine, harness: Harness) -> None:
    """Requests that share a batch get what the engine returns for all of its rows."""
    version = version_of(engine, harness)
    model = harness.load(load_backend(engine.backend), spec_of(engine, harness, batching=one_batch(ROWS)))
    rows, output = sample_rows(ROWS), next(iter(engine.outputs))
    expected = engine.direct(version, rows)[output]

    @given(cuts=st.sets(st.integers(1, ROWS - 1)))
    @settings(max_examples=25, deadline=None)
    def check(cuts: set[int]) -> None:
        parts = list(pairwise([0, *sorted(cuts), ROWS]))
        answers = harness.batch(model, [{engine.input: rows[start:end]} for start, end in parts])
        for (start, end), answer in zip(parts, answers, strict=True):
            np.testing.assert_allclose(
                answer.array(output), expected[start:end], rtol=engine.tolerance, atol=engine.tolerance
            )

    check()


def test_every_datatype_passes(engine: Engine, harness: Harness) -> None:
    for datatype in engine.datatypes:
        version = harness.directory(datatype, {}) / "1"
        engine.write_identity(version, datatype)
        # Backends for strings may take one dimension in all, the batch.
        dims, shape = ((), (3,)) if datatype == "BYTES" else ((-1,), (1, 3))
        tensors = [TensorSpec(name, datatype, dims) for name in engine.identity_names]
        spec = spec_of(engine, harness, datatype)
        config = {**spec.config, "name": datatype}
        spec = harness.spec(
            datatype,
            (tensors[0],),
            (tensors[1],),
            engine.file,
            backend=engine.backend,
            config=config,
            batching=DynamicBatching((), 0),
        )
        model = harness.load(load_backend(engine.backend), spec)
        data = extremes(datatype)
        answer = HarnessAnswer()
        given = Tensor(engine.identity_names[0], datatype, shape, data)
        model.submit(InferenceRequest(datatype, "", {given.name: given}, answer.respond, 0))
        assert answer.one.error is None, (datatype, answer.one.error)
        (output,) = answer.one.outputs
        assert (output.datatype, output.shape, bytes(output.data)) == (datatype, shape, data)


@pytest.mark.parametrize("dims", [None, (1,), (1, 1)])
def test_scalars_pass(file_format: Engine, harness: Harness, dims: tuple[int, ...] | None) -> None:
    """A config can't have empty dims: without a batch, dims of 1 stand for a scalar, completed or not."""
    if not file_format.scalars or (dims is None and not file_format.completes):
        pytest.skip("its files have no scalars" if dims else "its backend doesn't complete configs")
    backend = load_backend(file_format.backend)
    given, returned = file_format.identity_names
    for datatype in file_format.scalars:
        directory = harness.directory(datatype, {})
        file_format.write_scalar(directory / "1", datatype)
        text = (
            f'name: "{datatype}" backend: "{file_format.backend}" instance_group {{ count: 1 kind: KIND_CPU '
            f'}} default_model_filename: "{file_format.file}"'
        )
        for key, name in (("input", given), ("output", returned)) if dims else ():
            kind = "STRING" if datatype == "BYTES" else datatype
            text += f' {key} {{ name: "{name}" data_type: TYPE_{kind} dims: {list(dims or ())} }}'
        config = complete(parse_config(text, datatype), backend, directory / "1", {})
        raise_first(config_problems(config))
        raise_first(tensor_problems(config))
        model = harness.load(backend, build_spec(config, directory, 1, file_format.file, {}))
        one = {"BYTES": b"\x01\0\0\0x", "BOOL": b"\x01", "FP32": b"\0\0\x80?"}[datatype]
        value = Tensor(given, datatype, dims or (1,), one)
        answer = HarnessAnswer()
        model.submit(InferenceRequest(datatype, "", {given: value}, answer.respond, 0))
        assert answer.one.error is None, (datatype, answer.one.error)
        (output,) = answer.one.outputs
        assert (output.datatype, output.shape, bytes(output.data)) == (datatype, value.shape, one)


def extremes(datatype: str) -> bytes:
    """Three elements that a conversion on the way would change."""
    if datatype == "BYTES":
        return bytes(encode_bytes(np.array([b"", "é\n".encode(), b"x" * 300], dtype=object)))
    if datatype == "BOOL":
        return bytes([1, 0, 1])
    size = ELEMENT_SIZES[datatype]
    one = {"FP16": 0x3C01, "FP32": 0x3F800001, "FP64": 0x3FF0000000000001, "BF16": 0x3F81}.get(datatype, 1)
    top = {"FP16": 0x7C00, "FP32": 0x7F800000, "FP64": 0x7FF0000000000000, "BF16": 0x7F80}.get(
        datatype, (1 << (8 * size)) - 1
    )
    return b"".join(value.to_bytes(size, "little") for value in (one, top, 0))


def test_files_that_are_none_of_its_own(engine: Engine, harness: Harness) -> None:
    own = version_of(engine, harness) / engine.file
    whole = own.read_bytes()
    others = {
        "empty": b"",
        "random": np.random.default_rng(3).bytes(5000),
        "truncated": whole[: len(whole) // 2],
        "lfs": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n",
        "pickle": b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00\x8c\x07example\x94.",
        "plan": b"ptrt" + bytes(64),
    }
    for name, content in others.items():
        directory = harness.directory(name, {f"1/{engine.file}": content})
        with pytest.raises(ConchError) as caught:
            harness.load(load_backend(engine.backend), spec_of(engine, harness, name))
        assert str(directory / "1" / engine.file) in caught.value.message, (name, caught.value.message)
        assert not SOURCE.search(caught.value.message), (name, caught.value.message)
        if name in ("empty", "lfs", "plan"):
            hint = {"empty": "is empty", "lfs": "git lfs pull", "plan": "TensorRT plan"}[name]
            assert hint in caught.value.message, caught.value.message


@pytest.mark.slow
def test_damaged_files_and_files_with_code(file_format: Engine, tmp_path: Path) -> None:
    """No file ends the process, takes all memory or time, raises other errors than conch's, or runs code."""
    command = [sys.executable, "-m", "tests.support.engines.mutations", file_format.name, str(tmp_path), "40"]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, (ended.stdout[-500:], ended.stderr[-2000:])
    assert "seed 39" in ended.stdout
    assert not (tmp_path / "marker").exists()


def test_a_request_that_takes_too_much_memory_fails_alone(engine: Engine, harness: Harness) -> None:
    if not engine.allocates:
        pytest.skip("the size of its outputs does not depend on data")
    engine.write_allocating(harness.directory("m", {}) / "1")
    model = harness.load(load_backend(engine.backend), spec_of(engine, harness))
    huge = np.array([[2**11] * 4], np.float32)  # 64 TB, which no allocator gives
    # Dims that change: OpenVINO fails again for those that came before the failure.
    for small in (2, 3):
        error = harness.infer(model, {engine.input: huge}).one.error
        assert error is not None
        assert "allocate" in error.message and not SOURCE.search(error.message), error.message
        rows = np.array([[small, 1, 1, 1]], np.float32)
        assert harness.infer(model, {engine.input: rows}).array("y").tolist() == [[small] * WIDTH]


def test_warm_up_and_several_instances(engine: Engine, harness: Harness) -> None:
    version = version_of(engine, harness)
    spec = spec_of(engine, harness, instance_groups=(InstanceGroup("m_0", count=2),))
    sample = WarmupSample("zero", (WarmupInput(engine.input, "FP32", (WIDTH,), "ZERO", b""),), 2, 1)
    model = harness.load(load_backend(engine.backend), spec, [sample])
    rows = sample_rows(2)
    expected = engine.direct(version, rows)
    answers = [harness.infer(model, {engine.input: rows}) for _ in range(6)]
    for answer in answers:
        for name, values in expected.items():
            if name in engine.outputs:
                np.testing.assert_allclose(answer.array(name), values, rtol=1e-5, atol=1e-6)


def test_versions_change_under_load(engine: Engine, tmp_path: Path) -> None:
    """First by a new version in the repository, then by a file that comes with the request."""
    model = tmp_path / "models" / "m"
    for version in ("1", "other"):
        (model / version).mkdir(parents=True)
        engine.write(model / version, 0.0 if version == "1" else 10.0)
    other = (model / "other").rename(tmp_path / "other")
    (model / "config.pbtxt").write_text(engine.config("m"))
    rows = sample_rows(1)
    output = next(iter(engine.outputs))
    levels = [engine.direct(path, rows)[output] for path in (model / "1", other)]
    assert not np.allclose(levels[0], levels[1])
    flags = ["--model-control-mode=explicit", "--load-model=m", "--allow-model-upload"]
    stop = threading.Event()
    seen: list[Array] = []
    errors: list[Exception] = []

    with serving(tmp_path / "models", flags=flags) as server, client_of(server) as client:

        def ask() -> Array:
            answer: Array = client.infer("m", [tensor(engine.input, rows)]).as_numpy(output)
            return answer

        def keep_asking() -> None:
            while not stop.is_set():
                try:
                    seen.append(ask())
                except Exception as error:
                    errors.append(error)

        thread = threading.Thread(target=keep_asking)
        thread.start()
        try:
            eventually(lambda: seen, "an answer of the first version")
            other_file = {f"file:1/{engine.file}": (other / engine.file).read_bytes()}
            client.load_model("m", config=json.dumps(engine.parsed_config("m")), files=other_file)
            eventually(lambda: np.allclose(seen[-1], levels[1], 1e-5, 1e-6), "answers of the file sent")
            other.rename(model / "2")
            (model / "1").rename(tmp_path / "gone")
            client.load_model("m")
            np.testing.assert_allclose(ask(), levels[1], rtol=1e-5, atol=1e-6)
        finally:
            stop.set()
            thread.join()
    assert not errors
    assert all(any(np.allclose(each, level, 1e-5, 1e-6) for level in levels) for each in seen)


def test_six_files_load_at_once(engine: Engine, harness: Harness) -> None:
    loads_at_once(harness, [engine] * 6)


def test_files_of_all_engines_load_at_once(harness: Harness) -> None:
    engines = [each for each in ENGINES if not each.slow and not missing_packages(each)]
    loads_at_once(harness, engines * 2)


def loads_at_once(harness: Harness, engines: list[Engine]) -> None:
    """Each model answers as its engine does, whatever loads beside it."""
    versions = [version_of(engine, harness, f"m{n}") for n, engine in enumerate(engines)]
    start = threading.Barrier(len(engines))

    def load(n: int) -> Model:
        backend, spec = load_backend(engines[n].backend), spec_of(engines[n], harness, f"m{n}")
        start.wait()
        backend.check(spec)
        return harness.load(backend, spec)

    with ThreadPoolExecutor(len(engines)) as threads:
        models = list(threads.map(load, range(len(engines))))
    rows = sample_rows(2)
    for engine, version, model in zip(engines, versions, models, strict=True):
        output, expected = next(iter(engine.direct(version, rows).items()))
        answer = harness.infer(model, {engine.input: rows}).array(output)
        np.testing.assert_allclose(answer, expected, rtol=1e-5, atol=1e-6, err_msg=engine.name)


@pytest.mark.slow
def test_nothing_is_left_of_loads(engine: Engine, harness: Harness) -> None:
    version_of(engine, harness)
    backend, process = load_backend(engine.backend), psutil.Process()
    memory = 0
    for cycle in range(RAMP_UP + CYCLES):
        model = harness.load(backend, spec_of(engine, harness))
        harness.infer(model, {engine.input: sample_rows(1)}).wait()
        harness.close()
        if cycle == RAMP_UP:
            gc.collect()
            memory = process.memory_info().rss
    gc.collect()
    assert process.memory_info().rss < 1.03 * memory
