"""Objectives, limits, the paired interval, configs of variants, and the file of a search."""

from __future__ import annotations

import json
import os
import random
from dataclasses import replace
from pathlib import Path

import pytest
from google.protobuf import text_format

from conch.core.errors import InvalidArgumentError
from conch.core.padding import parse_padding
from conch.protocol.model_config_pb2 import ModelConfig, ModelDynamicBatching
from conch_control.config.parse import parse_config
from conch_tools import tune_command
from conch_tools.tune.apply import NotAppliedError, apply_winner
from conch_tools.tune.config_text import change_text
from conch_tools.tune.goals import Limit, Objectives, limits_json, limits_of, paired_gain, score
from conch_tools.tune.measurement import Measurement
from conch_tools.tune.space import apply_variant, make_space
from conch_tools.tune.tune_file import FormatError, TuneFile
from conch_tools.tune.tune_report import front
from conch_tools.tune.tuner import gpu_numbers
from conch_tools.tune.variants import digest_of, variant_text

MODEL = 'backend: "python" max_batch_size: 8 dynamic_batching { preferred_batch_size: 6 }'
THROUGHPUT = Objectives.parse(["throughput"])
ONE = Measurement(
    {"batch": 8}, "search", 1.0, 5, {}, requests=10, throughput=100.0, latency_us={"p99": 40e3}, host_bytes=10
)
IDENTITY = {
    "model": {"name": "m", "digest": "d"},
    "objectives": {"p99": 1.0},
    "constraints": {"p99": {"max": "20ms"}},
    "seed": 1,
    "today": {"batch": 8},
}
FACTS = {"tool": {}, "machine": {}, "model": {"version": "1", "config": {}}}


def test_a_variant_beyond_a_limit_is_below_all_others_and_lower_further_from_it() -> None:
    limits = [Limit.parse("max", "p99=20ms"), Limit.parse("max", "memory=2GB")]
    slow, slower = ONE, replace(ONE, latency_us={"p99": 80e3})
    met = replace(ONE, throughput=2.0, latency_us={"p99": 19e3})
    failed = replace(ONE, failed="refused")
    scores = [score(one, THROUGHPUT, limits) for one in (met, slow, slower, failed)]
    assert scores == sorted(scores, reverse=True)
    assert len(set(scores)) == 4
    assert scores[-1] < 0 < scores[-2]
    least = [Limit.parse("min", "throughput=100/s")]
    p99 = Objectives.parse(["p99"])
    assert score(slower, p99, least) > score(replace(met, throughput=99.0), p99, least)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["m", "--rate=5", "--objective=throughput"], "--objective throughput has no effect with --rate"),
        (["m", "--objective=p98"], "--objective: 'p98' is none of throughput, p50"),
        (["m", "--min=p99=5ms"], "--min: 'p99=5ms' is no limit; write throughput=100"),
        (["m", "--search=batch"], "--search takes FIELD=A,B"),
        (["apply", "x", "-f", "y"], "-f has no effect with apply"),
        ([], "it takes MODEL"),
    ],
)
def test_wrong_flags_are_refused(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert tune_command.run([*arguments, "--model-repository=none"]) == tune_command.USAGE
    assert text in capsys.readouterr().err


def test_several_objectives_gain_the_weighted_mean_of_their_gains() -> None:
    objectives = Objectives.parse(["throughput=3", "p99,memory"])
    # 8 times the throughput, a quarter of the latency, 4 times the memory.
    better = replace(ONE, throughput=800.0, latency_us={"p99": 10e3}, host_bytes=40)
    assert objectives.value(better) / objectives.value(ONE) == pytest.approx(8 ** (3 / 5))
    for text in ("speed", "p99=0", "p99=-1", "p99=x", ""):
        with pytest.raises(ValueError, match=r"is none of|is a number above 0"):
            Objectives.parse([text])


@pytest.mark.parametrize(
    "text", ["p99", "p99=20", "p99=-1ms", "memory=2ms", "p98=1ms", "memory=0GB", "throughput=9"]
)
def test_refuses_what_is_no_limit(text: str) -> None:
    with pytest.raises(ValueError, match="is no limit"):
        Limit.parse("max", text)


def test_the_paired_interval_has_the_truth_as_often_as_it_says() -> None:
    draw = random.Random(1)
    for truth in (1.0, 1.1):
        held = 0
        for _ in range(1000):
            pairs = []
            for _ in range(5):
                # The machine slows both of a pair.
                machine = draw.uniform(0.5, 1)
                pairs.append((machine * draw.gauss(1, 0.03), machine * truth * draw.gauss(1, 0.03)))
            gain = paired_gain(pairs)
            assert gain is not None
            held += gain.low <= truth - 1 <= gain.high
        assert 920 <= held <= 975


def test_todays_variant_changes_nothing_and_others_what_they_name() -> None:
    config = parse_config(MODEL, "config.pbtxt")
    space = make_space(config, {"preferred": ["none", "4", "2/6"]}, cores=2)
    assert all(space.today[name] in values for name, values in space.values.items())
    assert apply_variant(config, {}) == config
    for name, values in space.values.items():
        for value in values:
            made = apply_variant(config, {name: value})
            assert space.read(made)[name] == value
    config.model_warmup.add(name="full", batch_size=8)
    smaller = apply_variant(config, {"batch": 4})
    assert not smaller.dynamic_batching.preferred_batch_size
    assert smaller.model_warmup[0].batch_size == 4
    with pytest.raises(InvalidArgumentError, match="--search threads"):
        make_space(config, {"threads": ["1"]})
    with pytest.raises(InvalidArgumentError, match="a value is none, or sizes as 4/8, not '4/x'"):
        make_space(config, {"preferred": ["4/x"]})


def test_padded_lengths_change_on_all_axes() -> None:
    padding = {"inputs": {"A": [{"axis": 0, "to": [16, 64]}, {"axis": 1, "to": [16, 64]}]}, "outputs": {}}
    config = parse_config('max_batch_size: 4 input { name: "A" dims: [ -1, -1 ] }', "config.pbtxt")
    config.parameters["CONCH_PADDING"].string_value = json.dumps(padding)
    texts = {"16/64": 64, "pow2": 32, "multiple_of/8": 24, "32": 32}
    space = make_space(config, {"padding": list(texts)})
    assert (space.today["padding"], space.values["padding"]) == ("16/64", tuple(texts))
    assert "padding" not in make_space(config, {}).values
    for text, length in texts.items():
        made = apply_variant(config, {"padding": text})
        assert space.read(made)["padding"] == text
        axes = parse_padding(made.parameters["CONCH_PADDING"].string_value).inputs
        assert [axis.padded(20) for axis in axes] == [length, length]
    with pytest.raises(InvalidArgumentError, match="a value is lengths as 16/64, or pow2"):
        make_space(config, {"padding": ["x"]})


def test_variants_with_one_effect_are_one() -> None:
    config = parse_config(MODEL, "config.pbtxt")
    space = make_space(config, {"preferred": ["4", "8", "none"]}, cores=2)
    rest = {"instances": 1, "placement": "worker"}

    def same(one: dict[str, object], other: dict[str, object]) -> bool:
        return space.effective({**rest, **one}) == space.effective({**rest, **other})

    without = {"batch": 0, "delay_us": 0, "preferred": "none"}
    assert same({"batch": 0, "delay_us": 500, "preferred": "4"}, without)
    assert not same({"batch": 4, "delay_us": 500, "preferred": "none"}, without)
    # The largest batch is what the batcher prefers anyway.
    assert same(
        {"batch": 4, "delay_us": 0, "preferred": "4"}, {"batch": 4, "delay_us": 0, "preferred": "none"}
    )
    # As the server fills it in.
    filled = parse_config(MODEL.replace("6", "8"), "config.pbtxt")
    assert make_space(filled, {"preferred": ["4"]}).today["preferred"] == "none"
    unbatched = parse_config('backend: "python" max_batch_size: 8', "config.pbtxt")
    assert "delay_us" not in make_space(unbatched, {"batch": []}).values
    with pytest.raises(InvalidArgumentError, match="--search delay_us has no effect"):
        make_space(unbatched, {"batch": [], "delay_us": ["1", "2"]})
    assert 0 not in make_space(config, {}, batcher_can_go=False).values["batch"]


@pytest.mark.parametrize("text", ["", 'backend: "python"\nmax_batch_size: 8\n'])
def test_a_batcher_that_the_server_has_completed_is_written_with_its_fields(text: str) -> None:
    for changes, batcher in (
        ({"delay_us": 500}, "max_queue_delay_microseconds: 500"),
        (
            {"preferred": "2/4", "delay_us": 500},
            "preferred_batch_size: [2, 4] max_queue_delay_microseconds: 500",
        ),
        ({"batch": 4, "preferred": "2/8"}, "preferred_batch_size: 2"),
        ({"batch": 0, "preferred": "4", "delay_us": 500}, None),
    ):
        config = parse_config(variant_text(text, changes).text, "config.pbtxt")
        assert config.HasField("dynamic_batching") == (batcher is not None)
        assert config.dynamic_batching == text_format.Parse(batcher or "", ModelDynamicBatching())


WRITTEN = """# Of team A.
name: "m"  # its name
max_batch_size: 8, # as the trainer has it
input [ { name: "IN" data_type: TYPE_FP32 dims: [ 4 ] } ]  # "four" { values
dynamic_batching {
  # waits a little
  max_queue_delay_microseconds: 100
}
parameters { key: "x" value: { string_value: "1 # no comment }" } } # x
parameters: { key: "CONCH_PLACEMENT", value: { string_value: 'wor' "ker" } };
# The end."""


def test_a_changed_text_keeps_what_has_not_changed() -> None:
    old = text_format.Parse(WRITTEN, ModelConfig())
    assert change_text(WRITTEN, old).text == WRITTEN
    new = apply_variant(old, {"batch": 4, "delay_us": 0, "placement": "in_process", "instances": 2})
    made = change_text(WRITTEN, new)
    assert text_format.Parse(made.text, ModelConfig()) == new
    assert made.dropped == ("# waits a little",)
    kept = [
        line for line in WRITTEN.splitlines() if "#" in line and "waits" not in line and "trainer" not in line
    ]
    assert [line for line in made.text.splitlines() if line in kept] == kept
    assert "max_batch_size: 4, # as the trainer has it" in made.text
    without = change_text(WRITTEN, apply_variant(old, {"batch": 0}))
    assert "dynamic_batching" not in without.text
    assert len(without.text.splitlines()) == len(WRITTEN.splitlines()) - 4


def test_applying_twice_keeps_both_old_configs(tmp_path: Path) -> None:
    model = tmp_path / "m"
    model.mkdir()
    weights, config = model / "1" / "weights", model / "config.pbtxt"
    weights.parent.mkdir()
    weights.write_text("1 2")
    texts = []
    for size in (16, 32):
        config.write_text(WRITTEN.replace("8", str(size)))
        texts.append(config.read_text())
        identity = {**IDENTITY, "model": {"name": "m", "digest": digest_of(model)}}
        file = TuneFile(identity, FACTS, result={"winner": {"batch": 4}})
        weights.write_text("1 3")
        with pytest.raises(NotAppliedError, match="has changed since"):
            apply_winner(file, tmp_path)
        weights.unlink()
        weights.write_text("1 2")
        os.utime(weights, ns=(size, size))  # a copy with the same bytes is the same model
        applied = apply_winner(file, tmp_path)
        assert applied.backup is not None
        assert "max_batch_size: 4" in config.read_text()
        with pytest.raises(NotAppliedError, match="has changed since"):
            apply_winner(file, tmp_path)
    names = ("config.pbtxt.before-tune", "config.pbtxt.before-tune-2")
    assert [(model / name).read_text() for name in names] == texts


def test_gpus_add_up() -> None:
    metrics = {f"gpu_memory_used:GPU-{n}": 10.0 for n in (1, 2)} | {
        "gpu_utilization:GPU-1": 0.5,
        "other": 1.0,
    }
    assert gpu_numbers(metrics) == {"memory_bytes": 20.0, "utilization": 0.5}


def test_the_front_has_what_no_other_one_beats() -> None:
    draw = random.Random(2)
    found = [
        replace(ONE, throughput=draw.uniform(1, 9), latency_us={"p99": draw.uniform(1, 9)}) for _ in range(50)
    ]

    def beaten(one: Measurement) -> bool:
        return any(
            each.throughput > one.throughput and each.latency_us["p99"] < one.latency_us["p99"]
            for each in found
        )

    assert {id(one) for one in front(found)} == {id(one) for one in found if not beaten(one)}


def test_a_file_reads_back_and_belongs_to_one_search(tmp_path: Path) -> None:
    path = tmp_path / "tune.json"
    one = replace(ONE, histogram={"steps": {"1": 2}}, gpu={"memory_bytes": 3.0})
    file = TuneFile(IDENTITY, FACTS, [one], {}, [0], "user")
    file.write(path)
    assert json.loads(path.read_text())["measurements"][0]["latency_us"]["histogram"] == one.histogram
    found = TuneFile.read(path)
    assert found == file
    assert limits_json(found.limits) == IDENTITY["constraints"]
    assert limits_of(limits_json(found.limits)) == found.limits
    found.check_same(IDENTITY, path)
    with pytest.raises(FormatError, match="another seed"):
        found.check_same({**IDENTITY, "seed": 2}, path)
    path.write_text("[]")
    with pytest.raises(FormatError, match="not a file"):
        TuneFile.read(path)
