"""The scenes of scenes.toml, checked and typed."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

SCENES_FILE = Path(__file__).with_name("scenes.toml")
SERVERS = ("conch", "triton", "echo", "baseline")
CHOICES = {
    "protocol": ("grpc", "http"),
    "tensors": ("binary", "json"),
    "shared_memory": ("none", "system"),
    "generator": ("conch", "perf_analyzer"),
}
"""Keys that take one of some words."""


@dataclass(frozen=True)
class Contestant:
    """A server with the model it is asked for."""

    server: str
    model: str

    def label(self, scene_model: str) -> str:
        """The name in tables: the model is named only where it differs from the scene's."""
        return self.server if self.model == scene_model else f"{self.server}/{self.model}"


@dataclass(frozen=True)
class Scene:
    """One load, put on each contestant in turn."""

    name: str
    model: str
    shape: tuple[int, ...]
    concurrency: int
    requests: int
    protocol: str
    streaming: bool
    tensors: str
    shared_memory: str
    generator: str
    contestants: tuple[Contestant, ...]
    reference: Contestant
    expected: float | None

    @property
    def load(self) -> str:
        """The load in words, for tables."""
        shape = "x".join(map(str, self.shape))
        kind = "stream" if self.streaming else "unary" if self.protocol == "grpc" else f"HTTP {self.tensors}"
        where = "" if self.shared_memory == "none" else f", tensors in {self.shared_memory} shared memory"
        by = "" if self.generator == "conch" else f", by {self.generator}"
        return f"{self.model}, FP32 {shape}, {self.concurrency} in flight, {kind}{where}{by}"

    def only(self, servers: frozenset[str]) -> tuple[Contestant, ...]:
        """The contestants whose server takes part in this run; a baseline runs wherever conch does."""
        chosen: list[Contestant] = []
        for contestant in self.contestants:
            if contestant.server in servers:
                chosen.append(contestant)
            if contestant.server == "conch" and "baseline" in servers:
                chosen.append(Contestant("baseline", contestant.model))
        return tuple(chosen)


def load_scenes(path: Path = SCENES_FILE) -> dict[str, Scene]:
    """Read the scenes, in file order.

    Raises:
        ValueError: a scene is incomplete, has an unknown key, or names an unknown server.
    """
    document = tomllib.loads(path.read_text())
    defaults = document.get("defaults", {})
    scenes: dict[str, Scene] = {}
    for table in document.get("scene", []):
        scene = _scene({**defaults, **table})
        if scene.name in scenes:
            raise ValueError(f"{path.name}: two scenes are named {scene.name!r}")
        scenes[scene.name] = scene
    return scenes


def choose_scenes(names: str, scenes: dict[str, Scene]) -> list[Scene]:
    """The scenes for a comma-separated list of names, or for "all".

    Raises:
        ValueError: a name is unknown.
    """
    if names == "all":
        return list(scenes.values())
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    unknown = [name for name in wanted if name not in scenes]
    if unknown:
        raise ValueError(f"unknown scene {', '.join(unknown)}; there are {', '.join(scenes)}")
    return [scenes[name] for name in wanted]


def _scene(table: dict[str, Any]) -> Scene:
    """Check one table."""
    name = table.get("name", "(unnamed)")
    known = {field.name for field in fields(Scene)}
    unknown = sorted(table.keys() - known)
    missing = sorted(known - table.keys() - {"expected"})
    if unknown or missing:
        raise ValueError(f"scene {name!r}: unknown keys {unknown}, missing keys {missing}")
    for key, choices in CHOICES.items():
        if table[key] not in choices:
            raise ValueError(f"scene {name!r}: {key} is {table[key]!r}, must be one of {', '.join(choices)}")
    if table["protocol"] == "http" and table["streaming"]:
        raise ValueError(f"scene {name!r}: only gRPC has streaming")
    if table["tensors"] == "json" and (table["protocol"] != "http" or table["shared_memory"] != "none"):
        raise ValueError(f"scene {name!r}: only tensors in the bodies of HTTP can be JSON")
    plain = table["tensors"] == "binary" and table["shared_memory"] == "none"
    if table["generator"] == "perf_analyzer" and not plain:
        raise ValueError(f"scene {name!r}: perf_analyzer sends binary tensors in requests only")
    model = str(table["model"])
    contestants = tuple(_contestant(text, model, name) for text in table["contestants"])
    expected = table.get("expected")
    return Scene(
        name=str(name),
        model=model,
        shape=tuple(int(size) for size in table["shape"]),
        concurrency=int(table["concurrency"]),
        requests=int(table["requests"]),
        protocol=str(table["protocol"]),
        streaming=bool(table["streaming"]),
        tensors=str(table["tensors"]),
        shared_memory=str(table["shared_memory"]),
        generator=str(table["generator"]),
        contestants=contestants,
        reference=_contestant(table["reference"], model, name),
        expected=None if expected is None else float(expected),
    )


def _contestant(text: str, model: str, scene: str) -> Contestant:
    """Read "server" or "server/model"."""
    server, _, own_model = text.partition("/")
    if server not in SERVERS:
        raise ValueError(f"scene {scene!r}: unknown server {server!r}; there are {', '.join(SERVERS)}")
    return Contestant(server, own_model or model)
