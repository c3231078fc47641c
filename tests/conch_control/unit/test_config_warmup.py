"""Warm-up samples of a config: how they are read, and how they fail a load."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from conch.core.errors import ConchError, InvalidArgumentError
from conch.core.scheduling.scheduler import Batch
from conch.core.spec import WarmupInput, WarmupSample
from conch_control.config.parse import parse_config
from conch_control.config.warmup import read_warmup

if TYPE_CHECKING:
    from tests.support.sites import Site


def sample(value: str, more: str = "batch_size: 1") -> str:
    return f'model_warmup {{ name: "w" {more} inputs {{ key: "X" value {{ {value} }} }} }}'


def read(text: str, directory: Path) -> tuple[WarmupSample, ...]:
    return read_warmup(parse_config(text, "c"), directory)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A model's directory with files in its warm-up folder and a secret beside it."""
    directory = tmp_path / "m"
    (directory / "warmup" / "more").mkdir(parents=True)
    (directory / "warmup" / "four").write_bytes(b"\1\2\3\4")
    (directory / "warmup" / "more" / "strings").write_bytes(b"\2\0\0\0ab\0\0\0\0")
    (directory / "secret").write_bytes(b"1234")
    (directory / "warmup2").mkdir()
    (directory / "warmup2" / "four").write_bytes(b"1234")
    return directory


def test_everything_a_sample_says(directory: Path) -> None:
    text = """
        model_warmup {
            name: "a" batch_size: 3 count: 2
            inputs { key: "Z" value { data_type: TYPE_FP32 dims: [ 2, 3 ] zero_data: true } }
            inputs { key: "R" value { data_type: TYPE_STRING dims: 1 random_data: true } }
            inputs { key: "F" value { data_type: TYPE_UINT8 dims: 4 input_data_file: "four" } }
            inputs { key: "S" value { data_type: TYPE_STRING dims: 2 input_data_file: "more/strings" } }
        }
        model_warmup { name: "b" batch_size: 1 }
    """
    assert read(text, directory) == (
        WarmupSample(
            "a",
            (
                WarmupInput("F", "UINT8", (4,), "FILE", b"\1\2\3\4"),
                WarmupInput("R", "BYTES", (1,), "RANDOM"),
                WarmupInput("S", "BYTES", (2,), "FILE", b"\2\0\0\0ab\0\0\0\0"),
                WarmupInput("Z", "FP32", (2, 3), "ZERO"),
            ),
            3,
            2,
        ),
        WarmupSample("b", (), 1, 1),
    )


def test_a_sample_without_batch_size_is_run_with_one(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    zeros = "data_type: TYPE_FP32 dims: 2 zero_data: true"
    inputs = (WarmupInput("X", "FP32", (2,), "ZERO"),)
    assert read('name: "c" ' + sample(zeros, more="count: 3"), directory) == (
        WarmupSample("w", inputs, 1, 3),
    )
    assert "model 'c': warmup sample 'w' has no batch_size and is run with 1" in caplog.text


def test_more_of_a_file_than_needed_is_left(directory: Path) -> None:
    (made,) = read(sample('data_type: TYPE_INT16 dims: 1 input_data_file: "four"'), directory)
    assert made.inputs[0].data == b"\1\2"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("data_type: TYPE_INT8 dims: 4", "warmup setting expects input 'X' to have input_data_type set"),
        ("dims: 4 zero_data: true", "warmup setting expects input 'X' to have data_type set"),
        (
            "data_type: TYPE_INT8 dims: [ 2, -1 ] zero_data: true",
            "warmup setting expects all variable-size dimensions are specified for input 'X'",
        ),
        (
            'data_type: TYPE_INT16 dims: [ 3 ] input_data_file: "four"',
            "warmup setting expects 6 bytes, but the data provided from four only has 4 bytes",
        ),
        (
            'data_type: TYPE_INT16 dims: [ 4611686018427387904 ] input_data_file: "four"',
            "warmup setting expects 9223372036854775808 bytes, but the data provided from four only has 4 ",
        ),
        ('data_type: TYPE_INT8 dims: 4 input_data_file: "none"', "none: No such file or directory"),
        ('data_type: TYPE_INT8 dims: 4 input_data_file: ""', "warmup: Is a directory"),
        ('data_type: TYPE_STRING dims: 4 input_data_file: "nul\\000"', "embedded null"),
    ],
)
def test_samples_that_say_too_little(directory: Path, value: str, message: str) -> None:
    with pytest.raises(ConchError) as raised:
        read(sample(value), directory)
    assert raised.value.message.startswith("warmup sample 'w': ")
    assert message in raised.value.message


@pytest.mark.parametrize(
    "file", ["../secret", "../../m/secret", "../warmup2/four", "more/../../secret", "/etc/passwd"]
)
@pytest.mark.parametrize("datatype", ["INT8", "STRING"])
def test_files_stay_in_their_folder(directory: Path, file: str, datatype: str) -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        read(sample(f'data_type: TYPE_{datatype} dims: 4 input_data_file: "{file}"'), directory)
    assert raised.value.message == (
        f"warmup sample 'w': file '{file}' of input 'X' must stay within the folder 'warmup' of the model"
    )


FILE = sample('data_type: TYPE_UINT8 dims: 1 input_data_file: "one"')


def test_a_version_is_warmed_up_before_it_is_ready(site: Site) -> None:
    seen: list[object] = []

    def look(batch: Batch) -> None:
        seen.append((site.states("m"), [bytes(request.inputs["X"].data) for request in batch.requests]))

    site.backend.on_execute = look
    directory = site.model("m", config=site.config(FILE, "instance_group { count: 2 }"))
    (directory / "warmup").mkdir()
    (directory / "warmup" / "one").write_bytes(b"\x05")
    site.agent().load("m", {})
    assert seen == [({1: ("LOADING", "")}, [b"\x05"])] * 2
    assert site.states("m") == {1: ("READY", "")}


def test_a_failed_warm_up_fails_the_load_and_leaves_what_served(site: Site) -> None:
    agent = site.agent()
    site.model("m")
    agent.load("m", {})
    served = site.serving("m")
    works = site.backend.on_execute

    def fail(batch: Batch) -> None:
        raise ValueError("An Error Occurred")

    site.backend.on_execute = fail
    site.model("m", config=site.config(sample("data_type: TYPE_UINT8 dims: 1 zero_data: true")))
    with pytest.raises(InvalidArgumentError) as raised:
        agent.load("m", {})
    site.backend.on_execute = works
    assert raised.value.message == (
        "load failed for model 'm': version 1 is at UNAVAILABLE state: Invalid argument: failed to run "
        "warmup sample 'w': An Error Occurred; ;\n"
    )
    assert site.serving("m") == served
    assert site.send("m").error() is None
    assert site.backend.closed == ["m:1"]  # the instance that failed, not the one that serves


def test_a_file_that_is_missing_fails_the_load_before_the_backend_does_anything(site: Site) -> None:
    site.model("m", config=site.config(FILE))
    with pytest.raises(InvalidArgumentError, match="warmup sample 'w': failed to open text file for read"):
        site.agent().load("m", {})
    assert site.loads() == []
