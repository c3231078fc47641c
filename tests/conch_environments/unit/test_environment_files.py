"""Environment specs, read from a model's config and files."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from tests.support.environments import model

from conch.core.errors import InvalidArgumentError
from conch.core.spec import ModelSpec
from conch.workers.environment_spec import EnvironmentSpec, placement_of
from conch_environments.building import allows, key_of
from conch_environments.own_environments import BuiltEnvironment, PreparedEnvironment
from conch_environments.package_lists import Packages

PROJECT = '[project]\nname = "m"\ndependencies = ["pillow>=10", "scipy"]\nrequires-python = ">=3.10"\n'
SCRIPT = '''"""A model."""
# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "pillow",
# ]
# ///
import PIL
'''


def listed(spec: ModelSpec) -> Packages:
    own = EnvironmentSpec.of(spec).own
    assert isinstance(own, BuiltEnvironment)
    return own.packages


def prepared(path: Path) -> PreparedEnvironment:
    return PreparedEnvironment("m", path, "parameter 'EXECUTION_ENV_PATH'", {})


def test_most_models_ask_for_nothing(tmp_path: Path) -> None:
    spec = model(tmp_path, {"pyproject.toml": "[tool.ruff]\nline-length = 80\n"})
    assert not EnvironmentSpec.of(spec).reason
    assert placement_of(spec) == "worker"
    assert placement_of(replace(spec, parameters={"CONCH_PLACEMENT": "in_process"})) == "in_process"


def test_what_a_version_says_comes_before_what_the_model_says(tmp_path: Path) -> None:
    files = {"1/requirements.txt": "a", "1/pyproject.toml": PROJECT, "1/model.py": SCRIPT}
    spec = model(tmp_path, {**files, "requirements.txt": "b", "pyproject.toml": PROJECT})
    found = []
    for path in (*files, "requirements.txt", "pyproject.toml"):
        packages = listed(spec)
        found.append((packages.kind, str(packages.file.relative_to(spec.directory))))
        (spec.directory / path).unlink()
    assert found == [
        ("requirements", "1/requirements.txt"),
        ("project", "1/pyproject.toml"),
        ("script", "1/model.py"),
        ("requirements", "requirements.txt"),
        ("project", "pyproject.toml"),
    ]
    assert EnvironmentSpec.of(spec).own is None


def test_dependencies_in_toml(tmp_path: Path) -> None:
    packages = listed(model(tmp_path, {"pyproject.toml": PROJECT}))
    assert packages.dependencies == ("pillow>=10", "scipy")
    assert packages.requires_python == ">=3.10"
    packages = listed(model(tmp_path, {"1/model.py": SCRIPT}, name="script"))
    assert packages.dependencies == ("pillow",)
    assert packages.requires_python == ">=3.11"


def test_locks_count(tmp_path: Path) -> None:
    spec = model(tmp_path, {"pyproject.toml": PROJECT, "uv.lock": "version = 1\n"})
    packages = listed(spec)
    assert packages.kind == "uv-lock"
    before = key_of(packages, tmp_path)
    (spec.directory / "uv.lock").write_text("version = 2\n")
    again = listed(spec)
    assert key_of(again, tmp_path) != before
    (spec.directory / "pylock.toml").write_text('lock-version = "1.0"\n')
    last = listed(spec)
    assert last.kind == "pylock"


def packages_of(root: Path, name: str, files: dict[str, str]) -> Packages:
    return listed(model(root, files, name=name))


def key(root: Path, name: str, files: dict[str, str]) -> str:
    return key_of(packages_of(root, name, files), root / "notes")


def test_the_key_is_that_of_the_contents_wherever_they_are(tmp_path: Path) -> None:
    """Nested lists count at any depth; the rest of a script does not."""
    files = {
        "requirements.txt": "-r more.txt\n--constraint=limits.txt\n./local.whl\nx==1\n",
        "more.txt": "-r requirements.txt\ny\n",
        "limits.txt": "z<2\n",
        "local.whl": "1",
    }
    first = key(tmp_path, "a", files)
    assert first == key(tmp_path, "b", files)
    for number, path in enumerate(files):
        assert key(tmp_path, f"changed{number}", {**files, path: files[path] + "# more\n"}) != first, path
    script = key(tmp_path, "c", {"1/model.py": SCRIPT})
    assert script == key(tmp_path, "d", {"1/model.py": SCRIPT + "\nprint()\n"})
    assert script != key(tmp_path, "e", {"1/model.py": SCRIPT.replace("pillow", "scipy")})


RELATIVE = {
    "a directory": "./preproc",
    "a directory without a dot": "preproc/",
    "what follows is not its name": "./preproc[extra] ; python_version > '3'  # more",
    "an editable one": "-e preproc",
    "an editable one, in full": "--editable=./preproc",
    "wheels": "-f wheels",
    "wheels, in full": "--find-links ./wheels",
    "an index": "--index-url file:index",
    "a requirement with a place": "x @ file:preproc",
    "a requirement with a place, over two lines": "x \\\n @ ./preproc",
    "uv's variable": "x @ file://${PROJECT_ROOT}/preproc",
    "a wheel that is not there": "x-1.0-py3-none-any.whl",
    "in another list": "-r more.txt",
}


@pytest.mark.parametrize("line", RELATIVE.values(), ids=RELATIVE)
def test_what_lies_beside_a_list_is_that_list_s_own(tmp_path: Path, line: str) -> None:
    """Relative paths differ between models and versions."""
    files = {"requirements.txt": line, "more.txt": "./preproc"}
    assert key(tmp_path, "a", files) != key(tmp_path, "b", files)
    assert key(tmp_path, "a", files) == key(tmp_path, "a", files)
    assert key(tmp_path / "script", "a", {"1/model.py": scripted("x @ ./preproc")}) != key(
        tmp_path / "script", "b", {"1/model.py": scripted("x @ ./preproc")}
    )


def scripted(requirement: str) -> str:
    return f'# /// script\n# dependencies = ["{requirement}"]\n# ///\n'


ELSEWHERE = [
    "x==1",
    "x  # see ./preproc",
    "# ./preproc",
    "x==1 --hash=sha256:0123 --hash=sha256:4567",
    "x==1 \\\n    --hash=sha256:0123",
    "-f https://host/wheels",
    "-f /srv/wheels",
    "-i https://host/index",
    "--no-index",
    "--only-binary :all:",
    "/srv/preproc",
    "-e /srv/preproc",
    "x @ https://host/x-1.0-py3-none-any.whl",
    "x @ file:///srv/preproc",
    "x @ file://localhost/srv/preproc",
    "git+https://host/x.git@v1#egg=x",
    "-e git+https://host/x.git#egg=x",
    "https://host/x-1.0-py3-none-any.whl",
]


@pytest.mark.parametrize("line", ELSEWHERE)
def test_what_lies_elsewhere_is_the_same_for_all(tmp_path: Path, line: str) -> None:
    files = {"requirements.txt": line}
    assert key(tmp_path, "a", files) == key(tmp_path, "b", files)


UV = PROJECT + "[tool.uv]\n"


@pytest.mark.parametrize(
    ("text", "own"),
    [
        (UV + 'find-links = ["./wheels"]\n', True),
        (UV + 'find-links = ["/srv/wheels", "https://host"]\n', False),
        (UV + 'index-url = "index"\n', True),
        (UV + '[[tool.uv.index]]\nname = "x"\nurl = "https://host/simple"\n', False),
        (UV + '[[tool.uv.index]]\nname = "x"\nurl = "./index"\n', True),
        (UV + 'sources.x = { path = "preproc" }\n', True),
        (UV + 'sources.x = [{ path = "preproc", marker = "1" }]\n', True),
        (UV + "sources.x = { workspace = true }\n", True),
        (UV + 'sources.x = { path = "/srv/preproc", editable = true }\n', False),
        (UV + 'sources.x = { git = "https://host/x", branch = "main" }\n', False),
        (PROJECT.replace("scipy", "x @ file:preproc"), True),
        (PROJECT + "[tool.ruff]\nline-length = 80\n", False),
    ],
)
@pytest.mark.parametrize("locked", [False, True])
def test_what_lies_beside_a_project(tmp_path: Path, text: str, own: bool, locked: bool) -> None:
    files = {"pyproject.toml": text, **({"uv.lock": "version = 1\n"} if locked else {})}
    assert (key(tmp_path, "a", files) != key(tmp_path, "b", files)) is own


@pytest.mark.parametrize(
    ("package", "own"),
    [
        ('directory = { path = "preproc" }', True),
        ('wheels = [{ name = "x.whl", path = "./x.whl" }]', True),
        ('wheels = [{ name = "x.whl", url = "https://host/x.whl" }]', False),
        ('directory = { path = "/srv/preproc" }', False),
    ],
)
def test_what_lies_beside_a_lock(tmp_path: Path, package: str, own: bool) -> None:
    files = {"pylock.toml": f'lock-version = "1.0"\n[[packages]]\nname = "x"\n{package}\n'}
    assert (key(tmp_path, "a", files) != key(tmp_path, "b", files)) is own


@pytest.mark.parametrize(
    "line",
    [
        "./x-1.0-py3-none-any.whl",
        "x-1.0-py3-none-any.whl",
        "./x-1.0-py3-none-any.whl[extra] ; python_version > '3'",
        "./x-1.0-py3-none-any.whl --hash=sha256:0123",
        "x @ file:x-1.0-py3-none-any.whl",
        "x @ file://{directory}/x-1.0-py3-none-any.whl",
        "x[extra]@ {directory}/x-1.0-py3-none-any.whl#sha256=0123 ; python_version > '3'",
        "  {directory}/x-1.0-py3-none-any.whl  # ours",
    ],
)
def test_wheels_that_a_list_names_count(tmp_path: Path, line: str) -> None:
    """Their contents count for the key; reading the spec does not open them."""
    directory = tmp_path / "m"
    files = {"requirements.txt": line.format(directory=directory), "x-1.0-py3-none-any.whl": "1"}
    packages = packages_of(tmp_path, "m", files)
    assert packages.wheels == (directory / "x-1.0-py3-none-any.whl",)
    assert [path.name for path, _ in packages.contents] == ["requirements.txt"]
    first = key_of(packages, tmp_path / "notes")
    assert key(tmp_path, "m", {**files, "x-1.0-py3-none-any.whl": "two"}) != first


@pytest.mark.parametrize(
    "requirement", ["x @ file:x-1.0-py3-none-any.whl", "x @ file:///{directory}/x-1.0-py3-none-any.whl"]
)
def test_wheels_that_a_script_or_a_project_names_count(tmp_path: Path, requirement: str) -> None:
    text = requirement.format(directory=tmp_path / "m" / "1")
    for files in (
        {"1/model.py": scripted(text)},
        {"1/pyproject.toml": PROJECT.replace("scipy", text)},
    ):
        whole = {**files, "1/x-1.0-py3-none-any.whl": "1"}
        first = key(tmp_path, "m", whole)
        assert key(tmp_path, "m", {**whole, "1/x-1.0-py3-none-any.whl": "two"}) != first


@pytest.mark.parametrize(
    ("files", "text"),
    [
        ({"pyproject.toml": "[project"}, "'.*/pyproject.toml' is not TOML: "),
        ({"pyproject.toml": "\x00"}, "is not TOML: "),
        (
            {"pyproject.toml": '[project]\ndependencies = "x"'},
            "'dependencies' in .* must be a list of strings",
        ),
        (
            {"pyproject.toml": '[project]\ndependencies = ["x\\n-r /y"]'},
            "'dependencies' in .* must be a list",
        ),
        ({"pyproject.toml": '[project]\ndynamic = ["dependencies"]'}, "are dynamic, so they can't be told"),
        ({"pyproject.toml": "[project]\nrequires-python = 3"}, "'requires-python' in .* must be a string"),
        ({"pylock.toml": "requires-python = 3"}, "'requires-python' in .* must be a string"),
        ({"1/model.py": SCRIPT + SCRIPT}, "more than one comment '# /// script'"),
        ({"1/model.py": "# /// script\n# x = [\n# ///\n"}, "is not TOML"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, files: dict[str, str], text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"^model 'm': .*{text}"):
        EnvironmentSpec.of(model(tmp_path, files))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    spec = model(tmp_path, {"requirements.txt": ""})
    (spec.directory / "requirements.txt").unlink()
    (spec.directory / "requirements.txt").symlink_to("/proc/self/mem")
    with pytest.raises(InvalidArgumentError, match=r"requirements.txt' can't be read: "):
        EnvironmentSpec.of(spec)


def test_an_environment_that_the_config_names_comes_first(tmp_path: Path) -> None:
    spec = model(tmp_path, {"requirements.txt": "x", "env.tar.gz": ""}, {"EXECUTION_ENV_PATH": ""})
    assert listed(spec)
    spec = model(tmp_path, {}, {"EXECUTION_ENV_PATH": "$$TRITON_MODEL_DIRECTORY/env.tar.gz"})
    assert EnvironmentSpec.of(spec).own == prepared(spec.directory / "env.tar.gz")


def test_a_relative_path_starts_where_the_server_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "envs").mkdir()
    monkeypatch.chdir(tmp_path)
    spec = model(tmp_path, {}, {"EXECUTION_ENV_PATH": "envs"})
    assert EnvironmentSpec.of(spec).own == prepared(Path(os.getcwd(), "envs"))


def test_a_path_that_leads_nowhere_is_named(tmp_path: Path) -> None:
    spec = model(tmp_path, {}, {"EXECUTION_ENV_PATH": "$$TRITON_MODEL_DIRECTORY/none.tar.gz"})
    text = (
        f"model 'm': there is no '{spec.directory}/none.tar.gz', which parameter 'EXECUTION_ENV_PATH' names"
    )
    with pytest.raises(InvalidArgumentError) as caught:
        EnvironmentSpec.of(spec)
    assert caught.value.message == text


def test_variables(tmp_path: Path) -> None:
    parameters = {"CONCH_ENV_OMP_NUM_THREADS": "1", "CONCH_ENV_HOME": "$$TRITON_MODEL_DIRECTORY/x"}
    spec = model(tmp_path, {}, parameters)
    assert EnvironmentSpec.of(spec).variables == {"OMP_NUM_THREADS": "1", "HOME": f"{spec.directory}/x"}
    assert placement_of(spec) == "worker"
    for wrong in ("CONCH_ENV_", "CONCH_ENV_A B", "CONCH_ENV_1"):
        with pytest.raises(InvalidArgumentError, match=f"parameter '{wrong}' is no variable"):
            EnvironmentSpec.of(model(tmp_path, {}, {wrong: "x"}))


def test_what_is_to_be_ignored_is(tmp_path: Path) -> None:
    options = {"build-environments": "ignore"}
    spec = model(tmp_path, {"requirements.txt": "x"}, options=options)
    assert not EnvironmentSpec.of(spec).reason
    with pytest.raises(InvalidArgumentError, match="build-environments must be 'true', 'false' or 'ignore'"):
        EnvironmentSpec.of(model(tmp_path, options={"build-environments": "no"}))


@pytest.mark.parametrize("files", [{"requirements.txt": "x"}, {"1/model.py": SCRIPT}])
def test_the_placement_follows_unless_it_is_configured(tmp_path: Path, files: dict[str, str]) -> None:
    assert placement_of(model(tmp_path, files)) == "worker"
    assert placement_of(model(tmp_path, files, {"CONCH_PLACEMENT": "worker"})) == "worker"
    settings = [({"CONCH_PLACEMENT": "in_process"}, {}), ({}, {"placement": "in_process"})]
    names = ["parameter 'CONCH_PLACEMENT'", "--backend-config=python,placement"]
    for (parameters, options), name in zip(settings, names, strict=True):
        with pytest.raises(InvalidArgumentError, match="only a worker process can have") as caught:
            placement_of(model(tmp_path, files, parameters, options))
        assert name in caught.value.message
        assert next(iter(files)) in caught.value.message


NUMBERS = st.lists(st.integers(0, 14), min_size=1, max_size=3).map(lambda parts: ".".join(map(str, parts)))
CLAUSES = st.one_of(
    st.builds("{}{}".format, st.sampled_from(["==", "!=", "<=", ">=", "<", ">"]), NUMBERS),
    st.builds("{}{}.*".format, st.sampled_from(["==", "!="]), NUMBERS),
    st.builds("~={}.{}".format, st.integers(0, 4), NUMBERS.filter(lambda text: text.count(".") < 2)),
)


@given(
    st.lists(CLAUSES, max_size=3).map(", ".join),
    st.tuples(st.integers(0, 4), st.integers(0, 14), st.integers(0, 14)),
)
@example("~=3.11", (4, 0, 0))
@example("~=3.11.2", (3, 12, 0))
def test_versions_are_compared_as_pip_does(specifier: str, version: tuple[int, int, int]) -> None:
    expected = SpecifierSet(specifier).contains(Version(".".join(map(str, version))))
    assert allows(specifier, version) == expected


@pytest.mark.parametrize("specifier", ["3.10", ">=three", "~=3", ">=3.*", "===3.10", ">= 3 <4", ">=3.13rc1"])
def test_what_is_no_specifier_is_not_guessed_at(specifier: str) -> None:
    with pytest.raises(ValueError):
        allows(specifier, (3, 11, 0))
