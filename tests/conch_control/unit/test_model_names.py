"""Names of models that have namespaces."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from conch_control.control_options import ControlOptions
from conch_control.repository.dependency_graph import read_composing_models
from conch_control.repository.local import LocalRepository
from conch_control.repository.namespaces import Names
from conch_control.repository.repositories import Repositories
from conch_control.repository.source import ModelSource, Scan

NAMES = Names({"m": ("/a::m", "/b::m"), "u": ("/b::u",)})


@pytest.mark.parametrize(
    ("name", "own", "wanted", "meant"),
    [
        ("m", "/a", "", "/a::m"),
        ("m", "/b", "", "/b::m"),
        ("m", "/c", "", "m"),
        ("m", "/a", "/b", "/b::m"),
        ("u", "/a", "", "/b::u"),
        ("nope", "/a", "", "nope"),
        ("u", "/a", "/nowhere", "/nowhere::u"),
    ],
)
def test_names(name: str, own: str, wanted: str, meant: str) -> None:
    assert NAMES.resolve(name, own, wanted) == meant


class Failing:
    """A repository that can't always be read."""

    def __init__(self, path: Path) -> None:
        self._inner = LocalRepository(path)
        self.location = self._inner.location
        self.fails = False

    def check(self) -> None: ...

    def models(self) -> Mapping[str, ModelSource]:
        if self.fails:
            raise OSError("not now")
        return self._inner.models()

    def close(self) -> None: ...


def write(directory: Path, config: str = "") -> None:
    directory.mkdir(parents=True)
    (directory / "config.pbtxt").write_text(config)


def test_an_ensemble_changes_with_what_its_names_mean(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    maps = 'input_map { key: "X" value: "A" } output_map { key: "Y" value: "Z" }'
    write(
        one / "e",
        f"""platform: "ensemble" input {{ name: "A" }} output {{ name: "Z" }}
        ensemble_scheduling {{ step {{ model_name: "m" {maps} }} }}""",
    )
    write(two / "m")
    other = Failing(two)
    options = ControlOptions((), namespacing=True)
    repositories = Repositories(
        [LocalRepository(one), other], lambda source: read_composing_models(source, options)
    )
    ensemble = f"{one}::e"

    def state(scan: Scan) -> object:
        return scan.models[ensemble].fingerprint()

    before = repositories.scan()
    assert before.identified("m") == (f"{two}::m",)
    assert before.identified(f"{two}::m") == (f"{two}::m",)
    assert before.duplicates == frozenset()
    assert read_composing_models(before.models[ensemble], options) == (f"{two}::m",)
    other.fails = True
    unseen = repositories.scan()
    assert unseen.models.keys() == {ensemble}
    assert state(unseen) == state(before)
    other.fails = False
    write(one / "m")
    after = repositories.scan()
    assert state(after) != state(before)
    assert read_composing_models(after.models[ensemble], options) == (f"{one}::m",)
    assert after.identified("m") == (f"{one}::m", f"{two}::m")
    staged = after.models[ensemble].stage(lambda done, total: None, lambda: False)
    assert staged.fingerprint == state(after)
    assert staged.directory == one / "e"
    staged.release()
