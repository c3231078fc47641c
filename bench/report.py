"""Makes tables of measurements: medians, spreads and pairwise ratios; text and Markdown."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median

from bench.measurement import Measurement
from bench.scenes import Contestant, Scene

COLUMNS = (
    "contestant",
    "req/s [min-max]",
    "avg µs",
    "p50 µs",
    "p99 µs",
    "CPU µs/req [min-max]",
    "req/s ratio",
    "CPU ratio",
    "remarks",
)


@dataclass
class SceneResult:
    """All rounds of one scene; a round that gave no figure holds None, so that rounds stay paired."""

    scene: Scene
    contestants: tuple[Contestant, ...]
    rounds: dict[Contestant, list[Measurement | None]] = field(default_factory=dict)
    remarks: dict[Contestant, list[str]] = field(default_factory=dict)

    def add(self, contestant: Contestant, measurement: Measurement | None) -> None:
        """Record one round."""
        self.rounds.setdefault(contestant, []).append(measurement)

    def remark(self, contestant: Contestant, text: str) -> None:
        """Note what went wrong."""
        self.remarks.setdefault(contestant, []).append(text)

    def measured(self, contestant: Contestant) -> list[Measurement]:
        """The rounds that gave figures."""
        return [one for one in self.rounds.get(contestant, []) if one is not None]

    def ratio(self, contestant: Contestant, attribute: str) -> float | None:
        """The median over rounds of this contestant's figure by the reference's of the same round."""
        mine = self.rounds.get(contestant, [])
        theirs = self.rounds.get(self.scene.reference, [])
        pairs = [
            getattr(one, attribute) / getattr(other, attribute)
            for one, other in zip(mine, theirs, strict=False)
            if one is not None and other is not None and getattr(other, attribute)
        ]
        return median(pairs) if pairs else None


def headline(scene: Scene) -> str:
    """The line above a scene's table."""
    expected = "" if scene.expected is None else f"; aimed at {scene.expected:g}"
    return f"{scene.name}: {scene.load} (ratios against {scene.reference.label(scene.model)}{expected})"


def rows(result: SceneResult) -> list[tuple[str, ...]]:
    """One row of text per contestant."""
    return [_row(result, contestant) for contestant in result.contestants]


def _row(result: SceneResult, contestant: Contestant) -> tuple[str, ...]:
    label = contestant.label(result.scene.model)
    measured = result.measured(contestant)
    remarks = "; ".join(result.remarks.get(contestant, []))
    if not measured:
        return (label, *["-"] * (len(COLUMNS) - 2), remarks or "not measured")
    compared = contestant != result.scene.reference
    ratios = [
        result.ratio(contestant, name) if compared else None for name in ("throughput", "cpu_per_request")
    ]
    return (
        label,
        _spread([one.throughput for one in measured]),
        f"{median(one.average for one in measured):,.0f}",
        f"{median(one.p50 for one in measured):,.0f}",
        f"{median(one.p99 for one in measured):,.0f}",
        _spread([one.cpu_per_request for one in measured]),
        *("-" if ratio is None else f"{ratio:.2f}" for ratio in ratios),
        remarks,
    )


def _spread(values: list[float]) -> str:
    if len(values) == 1:
        return f"{values[0]:,.0f}"
    return f"{median(values):,.0f} [{min(values):,.0f}-{max(values):,.0f}]"


def text_table(result: SceneResult) -> str:
    """The scene's table for a terminal."""
    lines = [COLUMNS, *rows(result)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(COLUMNS))]
    last = len(COLUMNS) - 1  # remarks: free text, to the left like the names
    printed = [
        "  ".join(
            cell.ljust(width) if column in (0, last) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    return "\n".join([headline(result.scene), *printed])


def markdown_table(result: SceneResult) -> str:
    """The scene's section for a results file."""
    rule = ["---", *["---:"] * (len(COLUMNS) - 2), "---"]
    lines = ["| " + " | ".join(line) + " |" for line in (COLUMNS, rule, *rows(result))]
    return "\n".join([f"### {result.scene.name}", "", f"{headline(result.scene)}.", "", *lines])


def markdown(topic: str, facts: dict[str, str], method: str, results: list[SceneResult]) -> str:
    """The whole results file."""
    table = ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in facts.items())]
    parts = [f"# Benchmark: {topic}", "## Machine and versions", "\n".join(table), "## Method", method]
    return "\n\n".join([*parts, "## Results", *map(markdown_table, results)]) + "\n"
