"""The file of a search: its checkpoint and its result."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conch_tools.tune.goals import Limit, Objectives, limits_of
from conch_tools.tune.measurement import Measurement
from conch_tools.whole_files import write_whole

FORMAT = 1
_IDENTITY_OF_MODEL = ("name", "digest")


class FormatError(Exception):
    """A file is not one of conch tune's, or belongs to another search."""


@dataclass
class TuneFile:
    """The file ``tune.json``.

    Attributes:
        identity: Settings that a search must have in common with the file's to continue it.
        facts: The machine, versions, the command line, and the model's config.
        measurements: In order.
        result: Empty until the search has ended.
        best: Places of the best measurements, the best first; empty until the search has ended.
    """

    identity: dict[str, Any]
    facts: dict[str, Any] = field(default_factory=dict)
    measurements: list[Measurement] = field(default_factory=list)
    result: dict[str, Any] = field(default_factory=dict)
    best: list[int] = field(default_factory=list)
    stopped_by: str = ""

    @property
    def objectives(self) -> Objectives:
        """Objectives of the search."""
        return Objectives(self.identity["objectives"])

    @property
    def limits(self) -> list[Limit]:
        """Limits of the search."""
        return limits_of(self.identity["constraints"])

    def to_json(self) -> dict[str, Any]:
        """The whole file."""
        return {
            "format": FORMAT,
            **{name: value for name, value in self.facts.items() if name != "model"},
            **self.identity,
            "model": {**self.identity["model"], **self.facts["model"]},
            "measurements": [{"id": index, **one.to_json()} for index, one in enumerate(self.measurements)],
            "best": self.best,
            "result": self.result,
            "stopped_by": self.stopped_by,
        }

    def write(self, path: Path) -> None:
        """Writes the file, whole or not at all: each member and each measurement in a line."""
        members = []
        for name, value in self.to_json().items():
            text = json.dumps(value)
            if name == "measurements":
                text = "[\n" + ",\n".join(json.dumps(one) for one in value) + "\n]"
            members.append(f"{json.dumps(name)}: {text}")
        write_whole(path, "{\n" + ",\n".join(members) + "\n}\n")

    @classmethod
    def read(cls, path: Path) -> TuneFile:
        """Reads a file. Raises FormatError."""
        try:
            found = json.loads(path.read_text())
            if found.pop("format") != FORMAT:
                raise FormatError(f"{path}: this version of conch reads format {FORMAT}")
            measurements = []
            for one in found.pop("measurements"):
                one.pop("id")
                measurements.append(Measurement.from_json(one))
            ends = {name: found.pop(name) for name in ("result", "best", "stopped_by")}
            facts = {name: found.pop(name) for name in ("tool", "machine")}
            model = found.pop("model")
            found["model"] = {name: model.pop(name) for name in _IDENTITY_OF_MODEL}
            file = cls(found, {**facts, "model": model}, measurements, **ends)
            limits_of(file.identity["constraints"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise FormatError(f"{path}: not a file of conch tune: {error}") from error
        return file

    def check_same(self, identity: Mapping[str, Any], path: Path) -> None:
        """Raises FormatError: the file belongs to another search."""
        for name, value in json.loads(json.dumps(identity)).items():
            if self.identity.get(name) != value:
                raise FormatError(
                    f"{path} has another {name}: --restart begins again, -o names another folder"
                )
