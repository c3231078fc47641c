"""Scores, constraints, the paired interval, and configs of variants."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from conch.core.errors import InvalidArgumentError
from conch_control.config.parse import parse_config
from conch_tools.tune.space import apply_variant, make_space, today_of
from conch_tools.tune.tune_file import FormatError, Measurement, Most, TuneFile, paired_gain, score
from conch_tools.tune.tune_report import front

MODEL = 'backend: "python" max_batch_size: 8 dynamic_batching { preferred_batch_size: 6 }'
ONE = Measurement(
    {"batch": 8}, "search", 1.0, 5, {}, requests=10, throughput=100.0, latency_us={"p99": 40e3}, host_bytes=10
)


def test_a_variant_beyond_a_limit_is_below_all_others_and_lower_further_from_it() -> None:
    limits = [Most.parse("p99=20ms"), Most.parse("memory=2GB")]
    slow, slower = ONE, replace(ONE, latency_us={"p99": 80e3})
    met = replace(ONE, throughput=2.0, latency_us={"p99": 19e3})
    failed = replace(ONE, failed="refused")
    scores = [score(one, "throughput", limits) for one in (met, slow, slower, failed)]
    assert scores == sorted(scores, reverse=True)
    assert len(set(scores)) == 4
    assert scores[-1] < 0 < scores[-2]


@pytest.mark.parametrize("text", ["p99", "p99=20", "p99=-1ms", "memory=2ms", "p98=1ms", "memory=0GB"])
def test_refuses_what_is_no_limit(text: str) -> None:
    with pytest.raises(ValueError, match="is no limit"):
        Most.parse(text)


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
    space = make_space(config, {}, cores=2)
    today = today_of(config, space)
    assert all(today[name] in field.values for name, field in space.items())
    assert apply_variant(config, {}) == config
    for name, field in space.items():
        for value in field.values:
            made = apply_variant(config, {name: value})
            assert today_of(made, space)[name] == value
    assert not apply_variant(config, {"batch": 4}).dynamic_batching.preferred_batch_size
    with pytest.raises(InvalidArgumentError, match="--search threads"):
        make_space(config, {"threads": [1]})


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
    file = TuneFile({"seed": 1, "objective": "p99"}, {"tool": {}, "machine": {}}, [ONE], {}, "user")
    file.write(path)
    found = TuneFile.read(path)
    assert found == file
    found.check_same({"seed": 1, "objective": "p99"}, path)
    with pytest.raises(FormatError, match="another seed"):
        found.check_same({"seed": 2}, path)
    path.write_text("[]")
    with pytest.raises(FormatError, match="not a file"):
        TuneFile.read(path)
