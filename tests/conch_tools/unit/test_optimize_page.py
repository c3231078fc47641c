"""The page of conch optimize: figures with their data, chains of conversions, texts of others escaped."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from typing import Any

import pytest

from conch_tools.optimize.optimize_page import as_html
from conch_tools.optimize.optimize_report import conclusion

HOSTILE = "<img src=x onerror=alert(1)>|\"'&"


def candidate(name: str, chain: list[str], status: str, speed: float = 1.0) -> dict[str, Any]:
    profile = [{"batch": n, "p50_us": 9 / speed, "p99_us": 9.0, "throughput": n * speed} for n in (1, 2)]
    passed = status == "passed"
    return {
        "id": name,
        "chain": chain,
        "class": "exact",
        "status": status,
        "reason": "" if passed else HOSTILE,
        "accuracy": {HOSTILE: {"abs": 1e-6}} if name else {},
        "profile": profile if passed else [],
        "bytes": 1,
        "host_bytes": 1,
        "seconds": 1.0,
        "tail": HOSTILE if status == "error" else "",
    }


CANDIDATES = [
    candidate("01-a", ["a"], "passed"),
    candidate("02-b", ["b"], "passed", 2.0),
    candidate("03-c", ["c"], "error"),
    candidate("04-d", ["b", "d"], "failed"),
    candidate("", ["b", HOSTILE], "refused"),
]
REPORT = {
    "source": {"path": HOSTILE, "kind": "a", "digest": "", "inputs": [], "outputs": []},
    "environment": {"cpu": HOSTILE, "cores": 2, "flags": ["fma", "avx2"]},
    "samples": {"rows": 32, "origin": "random"},
    "noise": {HOSTILE: 0.0},
    "candidates": CANDIDATES,
    "recommended": "02-b",
    "front": ["02-b"],
    "tune": {"sentence": HOSTILE, "diff": HOSTILE},
}


def test_the_page_stands_alone_and_shows_what_was_made_of_what() -> None:
    text = as_html(REPORT, conclusion(REPORT))
    page = ET.fromstring(
        text.replace("<!DOCTYPE html>", "").replace('xmlns="http://www.w3.org/2000/svg" ', "")
    )
    assert not list(page.iter("img"))
    assert not list(page.iter("script"))
    for figure in page.iter("figure"):
        assert figure.find("svg") is not None
        assert figure.find("details/div/table") is not None
    pictures = {each.attrib["aria-label"]: each for each in page.iter("svg")}
    assert {"Latency and throughput", "Throughput by batch size"} < set(pictures)
    tree = pictures["Chains of conversions"]
    across = [float(each.attrib["cx"]) for each in tree.iter("circle")]
    depths = [sorted(set(across)).index(each) for each in across]
    names = [(each.text or "").partition(":")[0] for each in tree.iter("text")]
    assert dict(zip(names, depths, strict=True)) == {
        "the original, a": 0,
        "01-a": 1,
        "02-b": 1,
        "04-d": 2,
        HOSTILE: 2,
        "03-c": 1,
    }
    assert [each.text for each in page.iter("pre")] == [HOSTILE, HOSTILE]


@pytest.mark.parametrize(
    ("flags", "reduced"),
    [(["avx2"], True), (["avx2", "avx512f"], True), (["avx2", "avx_vnni"], False), ([], False)],
)
def test_the_page_says_if_weights_have_7_bits(flags: list[str], reduced: bool) -> None:
    report = {**REPORT, "environment": {"cpu": "x", "cores": 2, "flags": flags}}
    assert ("without VNNI: int8 weights of ONNX have 7 bits" in as_html(report, "")) is reduced


def test_the_page_of_a_run_in_which_nothing_passes_says_so() -> None:
    report = {**REPORT, "candidates": [CANDIDATES[2]], "recommended": None, "front": []}
    assert "there is nothing to serve" in as_html(report, conclusion(report))
