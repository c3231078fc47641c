"""Draws results beside Triton's: ``python -m bench.picture RESULTS.md PICTURE.svg SCENE...``.

Two panels of bars, requests per second and processor time of a request, each as a ratio to Triton's. A label
may follow a scene's name (``unary_32="gRPC, 32 clients"``) and a contestant's (``baseline="conch, pure"``).
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

REFERENCE = "triton"
COLORS = {"conch": "#0e7c86", "baseline": "#7cc4c9", REFERENCE: "#a0a0a0"}
PANELS = ("req/s ratio", "CPU ratio")
TITLES = ("requests per second", "processor time of a request")
NAMES_PX, PANEL_PX, BAR_PX, HEAD_PX = 190, 330, 13, 46


@dataclass(frozen=True)
class Results:
    """A results file: facts of the machine, and ratios to Triton by scene, contestant and column."""

    facts: dict[str, str]
    scenes: dict[str, dict[str, dict[str, float]]]


def read(text: str) -> Results:
    """Reads a results file of `bench.run`."""
    head, *sections = re.split(r"^### ", text, flags=re.MULTILINE)
    scenes: dict[str, dict[str, dict[str, float]]] = {}
    for section in sections:
        columns, *lines = _cells(section)
        found = scenes.setdefault(section.partition("\n")[0].strip(), {})
        for line in lines:
            cells = dict(zip(columns, line, strict=True))
            ratios = {each: cells[each] for each in PANELS if cells[each] != "-"}
            if ratios or line[0] == REFERENCE:
                found[line[0]] = {each: float(ratios.get(each, 1)) for each in PANELS}
    return Results({key: value for key, value, *_ in _cells(head) if key}, scenes)


def _cells(text: str) -> list[list[str]]:
    """The cells of a table's lines, without the rule."""
    lines = [line for line in text.splitlines() if re.match(r"\|(?! ?---)", line)]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def draw(results: Results, scenes: dict[str, str], contestants: dict[str, str]) -> str:
    """An SVG picture of some scenes and contestants, which are named with their labels."""
    shown = {name: results.scenes[name] for name in scenes}
    ratios = {
        (scene, who, panel): measured[who][panel]
        for scene, measured in shown.items()
        for who in contestants
        for panel in PANELS
        if who in measured
    }
    row = BAR_PX * len(contestants) + 14
    width, height = NAMES_PX + 2 * PANEL_PX, HEAD_PX + row * len(shown) + 46
    parts = [f'<rect width="{width}" height="{height}" fill="#ffffff"/>']
    for column, (panel, title) in enumerate(zip(PANELS, TITLES, strict=True)):
        left = NAMES_PX + column * PANEL_PX
        # Room for the figure behind the longest bar.
        scale = (PANEL_PX - 60) / max(ratio for (_, _, which), ratio in ratios.items() if which == panel)
        parts.append(_text(left, 32, f"{title}, Triton = 1", weight="bold"))
        for line, scene in enumerate(shown):
            for bar, who in enumerate(contestants):
                ratio = ratios.get((scene, who, panel))
                if ratio is not None:
                    top = HEAD_PX + line * row + bar * BAR_PX
                    length = f'width="{ratio * scale:.1f}" height="{BAR_PX - 2}" fill="{COLORS[who]}"'
                    parts.append(f'<rect x="{left}" y="{top}" {length}/>')
                    parts.append(_text(left + ratio * scale + 4, top + BAR_PX - 3, f"{ratio:.2f}"))
    for line, scene in enumerate(shown):
        parts.append(_text(8, HEAD_PX + line * row + BAR_PX * len(contestants) / 2 + 3, scenes[scene]))
    at = NAMES_PX
    for who, label in contestants.items():
        parts.append(f'<rect x="{at}" y="6" width="10" height="10" fill="{COLORS[who]}"/>')
        parts.append(_text(at + 14, 15, label))
        at += 30 + 7 * len(label)
    facts = results.facts
    versions = ", ".join(f"{name} {facts[name].partition(',')[0]}" for name in ("Python", "grpcio", "numpy"))
    parts.append(_text(8, height - 24, f"{facts['CPU']}; {versions}; rounds: {facts['rounds per scene']}"))
    # A server's name is not told apart by what it says of itself: clients ask conch, too, for "triton".
    servers = (f"{label} {facts[f'server: {who}'].partition(' ')[2]}" for who, label in contestants.items())
    parts.append(_text(8, height - 9, "; ".join(servers)))
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    style = 'font-family="sans-serif" font-size="11" fill="#202020"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>' + "\n".join(parts) + "</svg>\n"


def _text(x: float, y: float, text: str, weight: str = "normal") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" font-weight="{weight}">{escape(text)}</text>'


def main() -> None:
    """Reads the command line, and writes the picture."""
    parser = argparse.ArgumentParser(prog="python -m bench.picture")
    parser.add_argument("results", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("scene", nargs="+", help="NAME, or NAME=LABEL")
    parser.add_argument("--contestant", action="append", required=True, help="NAME, or NAME=LABEL")
    asked = parser.parse_args()
    scenes, contestants = (
        {name: label or name for name, _, label in (each.partition("=") for each in named)}
        for named in (asked.scene, asked.contestant)
    )
    asked.picture.write_text(draw(read(asked.results.read_text()), scenes, contestants))


if __name__ == "__main__":
    main()
