"""Progress of rollouts on disk: one JSON file for each model in the state directory.

A file is written under a temporary name, synced and renamed, so that after a crash it is the old or the new
one. Files that can't be read are logged and ignored: their models begin anew.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from conch_control.state_files import TEMPORARY, make_state_directory, sync_directory, write_state_file
from conch_rollout.rollout_file import WHOLE, Declaration, as_json, check_declaration
from conch_rollout.rollout_state import Progress, Refusal, State, Transition
from conch_rollout.split_places import Places

log = logging.getLogger(__name__)

FORMAT = 1
_LONGEST = 200


@dataclass(frozen=True, slots=True)
class SavedRollout:
    """Saved rollout of a model: progress, history, and the declaration if that came by a call."""

    progress: Progress
    declaration: Declaration | None = None
    history: tuple[Transition, ...] = ()


class StateDirectory:
    """The state directory of one server. Not thread-safe.

    Raises:
        InvalidArgumentError: The directory can't be made or read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        make_state_directory(path)

    def read(self) -> dict[str, SavedRollout]:
        """Reads the saved rollout of each model; removes temporary files that a crash has left."""
        found = {}
        for path in sorted(self.path.iterdir()):
            if path.name.endswith(f".json{TEMPORARY}"):
                path.unlink(missing_ok=True)
                continue
            try:
                model, saved = decoded(json.loads(path.read_bytes()))
                if path.name != file_name(model):
                    raise ValueError(f"it is of model '{model}', which has {file_name(model)}")
            except (
                OSError,
                ValueError,
                RecursionError,
            ) as error:  # ValueError: no JSON, no UTF-8, wrong content
                log.warning("%s is no state of a rollout and is ignored: %s", path, error)
                continue
            found[model] = saved
        return found

    def write(self, model: str, saved: SavedRollout) -> None:
        """Writes a model's saved rollout. Raises OSError: it can't be written; the former content stays."""
        content = json.dumps(encoded(model, saved), indent=1)
        write_state_file(self.path / file_name(model), content)

    def remove(self, model: str) -> None:
        """Removes a model's saved rollout, if any. Raises OSError: it can't be removed."""
        (self.path / file_name(model)).unlink(missing_ok=True)
        sync_directory(self.path)


def file_name(model: str) -> str:
    """Name of a model's file; one of a very long name ends with a digest."""
    name = quote(model, safe="", errors="surrogatepass")
    if len(name) > _LONGEST:
        digest = hashlib.blake2b(model.encode(errors="surrogatepass"), digest_size=16).hexdigest()
        name = f"{name[: _LONGEST - len(digest)]}{digest}"
    return f"{name}.json"


def encoded(model: str, saved: SavedRollout) -> dict[str, Any]:
    """The content of a state file."""
    progress = {field.name: getattr(saved.progress, field.name) for field in dataclasses.fields(Progress)}
    progress["state"] = saved.progress.state.value
    if not saved.progress.places:  # a release without them reads the file, too
        del progress["places"]
    progress["refused"] = [
        {"version": each.version, "digest": each.digest, "by_call": False}  # a former release needs it
        for each in saved.progress.refused
    ]
    content: dict[str, Any] = {"format": FORMAT, "model": model, "progress": progress}
    if saved.declaration is not None:
        content["declaration"] = as_json(saved.declaration)
    content["history"] = [
        {field.name: getattr(each, field.name) for field in dataclasses.fields(Transition)}
        | {"state": each.state.value}
        for each in saved.history
    ]
    return content


def decoded(content: Any) -> tuple[str, SavedRollout]:
    """Model and state of a state file. Raises ValueError: something is wrong, named by its field."""
    _check_fields(
        "", content, {"format": int, "model": str, "progress": dict}, {"declaration": dict, "history": list}
    )
    if content["format"] != FORMAT:
        raise ValueError(f"format: is {content['format']}, this server reads {FORMAT}")
    declaration = None
    if "declaration" in content:
        declaration, problems = check_declaration(content["declaration"], "declaration")
        if problems:
            raise ValueError(problems[0].message)
    history = tuple(_transition(each) for each in content.get("history", ()))
    return content["model"], SavedRollout(_progress(content["progress"]), declaration, history)


def _transition(fields: Any) -> Transition:
    version = int | None
    _check_fields(
        "history.",
        fields,
        {
            "seconds": float,
            "number": int,
            "state": str,
            "step": int,
            "weight": int,
            "stable": version,
            "candidate": version,
            "reason": str,
            "called": bool,
        },
    )
    return Transition(**{**fields, "state": _state(fields["state"], "history.state")})


def _state(name: str, at: str) -> State:
    if name not in State.__members__:
        raise ValueError(f"{at}: is {name!r}, which is no state")
    return State[name]


def _progress(fields: dict[str, Any]) -> Progress:
    optional = int | None
    _check_fields(
        "progress.",
        fields,
        {
            "state": str,
            "number": int,
            "stable": optional,
            "candidate": optional,
            "digest": str,
            "previous": optional,
            "step": int,
            "weight": int,
            "shadow": int,
            "reason": str,
            "called": bool,
            "refused": list,
            "declared": str,
            "declared_stable": optional,
        },
        {"places": list | tuple},
    )
    places = _places(fields.get("places", ()))
    for key, value in fields.items():
        if isinstance(value, int) and value < 0:
            raise ValueError(f"progress.{key}: is {value}, below 0")
    for key in ("weight", "shadow"):
        if fields[key] > WHOLE:
            raise ValueError(f"progress.{key}: is {fields[key]}, above {WHOLE}")
    state = _state(fields["state"], "progress.state")
    for refusal in fields["refused"]:
        _check_fields("progress.refused.", refusal, {"version": int, "digest": str}, {"by_call": bool})
    refused = tuple(Refusal(each["version"], each["digest"]) for each in fields["refused"])
    return Progress(**{**fields, "state": state, "refused": refused, "places": places})


def _places(content: Any) -> Places:
    shown = "progress.places: is no list of versions and counts that add up to"
    try:
        places = tuple((version, count) for version, count in content)
        if any(type(each) is not int or each < 0 for place in places for each in place):
            raise ValueError
        if places and sum(count for _, count in places) != WHOLE:
            raise ValueError
    except (TypeError, ValueError):
        raise ValueError(f"{shown} {WHOLE}") from None
    return places


def _check_fields(
    at: str, content: Any, needed: Mapping[str, Any], optional: Mapping[str, Any] | None = None
) -> None:
    if not isinstance(content, dict):
        raise ValueError(f"{at.rstrip('.') or 'its content'}: is no table")
    known = {**needed, **(optional or {})}
    for key in (*needed, *content):
        if key not in known:
            raise ValueError(f"{at}{key}: unknown field")
        if key not in content:
            raise ValueError(f"{at}{key}: is missing")
        value = content[key]
        if not isinstance(value, known[key]) or (isinstance(value, bool) and known[key] is not bool):
            raise ValueError(f"{at}{key}: is {value!r}")
