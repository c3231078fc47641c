"""Environments from spec to worker: interpreter, variables, packages."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.environments import make_venv, model, numpy_wheel, packed, site_of_numpy, wheel
from tests.support.servers import WAIT_S, eventually

from conch.core.errors import (
    ConchError,
    InternalError,
    InvalidArgumentError,
    UnavailableError,
    UnsupportedError,
)
from conch.core.model_control import cancellable_load
from conch.core.spec import ModelSpec
from conch.workers.environment import NAMES, PREFIXES, Environment
from conch.workers.environment_spec import EnvironmentSpec
from conch_environments import building as building_module
from conch_environments.building import Tools
from conch_environments.cache import EnvironmentCache
from conch_environments.interpreter import interpreter_in
from conch_environments.own_environments import BuiltEnvironment, PreparedEnvironment
from conch_environments.tools import Output, run_tool

pytestmark = pytest.mark.process

OLD = '#!/bin/sh\necho \'{"version": [3, 8, 18], "numpy": "1.24.0", "problem": null}\'\n'


@pytest.fixture
def cache(tmp_path: Path) -> EnvironmentCache:
    return EnvironmentCache(tmp_path / "cache")


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    """A folder of wheels: numpy, and some packages."""
    folder = tmp_path / "wheels"
    numpy_wheel(folder)
    wheel(folder, "conch_tiny", "1.0", {"conch_tiny.py": "VERSION = 1\n"})
    wheel(folder, "conch_tiny", "2.0", {"conch_tiny.py": "VERSION = 2\n"})
    wheel(folder, "conch_needs", "1.0", {"conch_needs.py": ""}, requires="conch_tiny<2")
    return folder


def only(wheels: Path, *lines: str) -> str:
    """A requirements file that looks for packages only there."""
    return "\n".join(["--no-index", f"--find-links {wheels}", *lines, ""])


def run(environment: Environment, code: str) -> Any:
    """Evaluates code in an environment, as a worker would."""
    command = [str(environment.python), "-c", f"import json; print(json.dumps({code}))"]
    done = subprocess.run(command, env=environment.variables, capture_output=True, check=True, text=True)
    return json.loads(done.stdout)


def environment_for(spec: ModelSpec, cache: EnvironmentCache) -> Environment:
    options = {**spec.backend_options, "environment-cache": str(cache.directory)}
    return EnvironmentSpec.of(replace(spec, backend_options=options)).make()


@contextmanager
def environment_released(environment: Environment) -> Iterator[Environment]:
    try:
        yield environment
    finally:
        environment.release()


def uses(environment: Environment) -> tuple[str, str]:
    """Prefix and numpy version of an environment, which is released."""
    prefix, version = run(environment, "[__import__('sys').prefix, __import__('numpy').__version__]")
    environment.release()
    return prefix, version


def test_by_default_it_is_the_servers(
    tmp_path: Path, cache: EnvironmentCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    environment = environment_for(model(tmp_path), cache)
    assert environment.python == Path(sys.executable)
    assert environment.variables["PATH"] == os.environ["PATH"]
    assert environment.paths == ()
    assert run(environment, "__import__('sys').prefix") == sys.prefix
    assert str(tmp_path) in run(environment, "__import__('sys').path")
    assert not cache.directory.exists()


def test_variables_of_a_model(tmp_path: Path, cache: EnvironmentCache) -> None:
    spec = model(tmp_path, {}, {"CONCH_ENV_A": "$$TRITON_MODEL_DIRECTORY/a", "CONCH_ENV_PATH": "/only"})
    environment = environment_for(spec, cache)
    assert run(environment, "dict(__import__('os').environ)")["A"] == f"{spec.directory}/a"
    assert environment.variables["PATH"] == "/only"
    assert "A" not in os.environ


def test_an_environment_for_models_without_one(tmp_path: Path) -> None:
    """The setting of a model itself comes first."""
    options = {"environment": str(tmp_path)}
    own = EnvironmentSpec.of(model(tmp_path, {}, {}, options)).own
    assert own == PreparedEnvironment("m", tmp_path, "--backend-config=...,environment", options)
    listed = model(tmp_path, {"requirements.txt": "numpy"}, {}, options, name="listed")
    assert isinstance(EnvironmentSpec.of(listed).own, BuiltEnvironment)
    with pytest.raises(
        InvalidArgumentError, match=r"there is no '/none', which --backend-config=\.\.\.,environment"
    ):
        EnvironmentSpec.of(model(tmp_path, {}, {}, {"environment": "/none"}, name="other"))


@pytest.mark.parametrize("own", [False, True], ids=["the server's", "a venv"])
def test_workers_inherit_no_secrets(
    tmp_path: Path, cache: EnvironmentCache, monkeypatch: pytest.MonkeyPatch, own: bool
) -> None:
    secrets = ("AWS_SECRET_ACCESS_KEY", "TRITONCACHE_REDIS_PASSWORD", "NVIDIA_API_KEY", "XDG_TOKEN", "OTHER")
    for name in (*secrets, "OMP_NUM_THREADS", "TMPDIR", "VLLM_MAX_TOKENS_PER_EXPERT", "VLLM_API_KEY"):
        monkeypatch.setenv(name, str(tmp_path))
    parameters = {"CONCH_PASS_ENVIRONMENT": "OTHER, AWS_*"}
    if own:
        make_venv(tmp_path / "venv")
        parameters["EXECUTION_ENV_PATH"] = str(tmp_path / "venv")
    passes = EnvironmentSpec.of(model(tmp_path, {}, {"CONCH_PASS_ENVIRONMENT": "OTHER"}))
    assert passes.reason == "parameter 'CONCH_PASS_ENVIRONMENT'"  # it has no effect in process
    environment = environment_for(model(tmp_path, {}, parameters), cache)
    found = run(environment, "dict(__import__('os').environ)")
    assert {"OMP_NUM_THREADS", "TMPDIR", "AWS_SECRET_ACCESS_KEY", "OTHER"} <= found.keys()
    assert "VLLM_MAX_TOKENS_PER_EXPERT" in found, "a number of tokens is no secret"
    assert not {"TRITONCACHE_REDIS_PASSWORD", "NVIDIA_API_KEY", "XDG_TOKEN", "VLLM_API_KEY"} & found.keys()
    everything = EnvironmentSpec.read("m", tmp_path, "model.py", {}, {"pass-environment": "*"})
    assert set(secrets) <= everything.variables.keys()
    with pytest.raises(InvalidArgumentError, match="'CONCH_PASS_ENVIRONMENT' must list names"):
        EnvironmentSpec.of(model(tmp_path, {}, {"CONCH_PASS_ENVIRONMENT": "A=b"}))


def test_the_page_lists_what_workers_inherit() -> None:
    page = (Path(__file__).parents[3] / "docs" / "python-models.md").read_text()
    listed = (*NAMES, *(f"{prefix}*" for prefix in PREFIXES))
    assert [name for name in listed if f"`{name}`" not in page] == []


def test_a_venv(tmp_path: Path, cache: EnvironmentCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:relative:")
    monkeypatch.setenv("PYTHONHOME", "/nowhere")
    make_venv(tmp_path / "m" / "venv")
    environment = environment_for(
        model(tmp_path, {}, {"EXECUTION_ENV_PATH": "$$TRITON_MODEL_DIRECTORY/venv"}), cache
    )
    assert environment.python == tmp_path / "m" / "venv" / "bin" / "python"
    assert environment.variables["VIRTUAL_ENV"] == str(tmp_path / "m" / "venv")
    assert environment.variables["PATH"].startswith(f"{tmp_path}/m/venv/bin:")
    assert "PYTHONHOME" not in environment.variables
    # After the installed packages.
    assert environment.paths == (tmp_path, Path.cwd() / "relative")
    assert environment.version == ".".join(map(str, sys.version_info[:3]))
    assert uses(environment) == (str(tmp_path / "m" / "venv"), np.__version__)
    assert not cache.directory.exists()


@pytest.fixture
def conda(tmp_path: Path) -> Path:
    """A directory like a conda environment: no venv, but with libraries and scripts."""
    prefix = tmp_path / "conda"
    (prefix / "bin").mkdir(parents=True)
    (prefix / "lib").mkdir()
    # The modules lie elsewhere; only the variables matter here.
    (prefix / "bin" / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (prefix / "bin" / "python").chmod(0o755)
    scripts = prefix / "etc" / "conda" / "activate.d"
    scripts.mkdir(parents=True)
    (scripts / "gdal.sh").write_text('export GDAL_DATA="$CONDA_PREFIX/share"\necho "activated $0"\n')
    return prefix


def test_a_conda_environment_is_activated(
    conda: Path, tmp_path: Path, cache: EnvironmentCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", "/usr/lib/here")
    variables = environment_for(model(tmp_path, {}, {"EXECUTION_ENV_PATH": str(conda)}), cache).variables
    assert variables["CONDA_PREFIX"] == str(conda)
    assert variables["GDAL_DATA"] == f"{conda}/share"
    assert variables["LD_LIBRARY_PATH"] == f"{conda}/lib:/usr/lib/here"
    assert variables["PYTHONNOUSERSITE"] == "1"
    assert "CONCH_LAST_STEP" not in variables
    monkeypatch.delenv("LD_LIBRARY_PATH")
    assert interpreter_in(conda, "env").variables["LD_LIBRARY_PATH"] == f"{conda}/lib"


def test_an_archive_is_unpacked_once(tmp_path: Path, cache: EnvironmentCache, conda: Path) -> None:
    """`conda-unpack` runs once and adapts its paths."""
    (conda / "bin" / "conda-unpack").write_text(
        "import os, sys\n"
        "prefix = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))\n"
        "open(prefix + '/where', 'a').write(prefix)\n"
    )
    archive = packed(conda, tmp_path / "env.tar.gz")
    spec = model(tmp_path, {}, {"EXECUTION_ENV_PATH": str(archive)})
    first, second = environment_for(spec, cache), environment_for(spec, cache)
    assert first == second
    prefix = first.python.parents[1]
    assert prefix.is_relative_to(cache.directory)
    assert (prefix / "where").read_text() == str(prefix)
    again = tmp_path / "again.tar.gz"
    again.write_bytes(archive.read_bytes())
    third = environment_for(model(tmp_path, {}, {"EXECUTION_ENV_PATH": str(again)}), cache)
    assert third.python == first.python
    for environment in (first, second, third):
        environment.release()


def test_an_archive_of_a_venv(tmp_path: Path, cache: EnvironmentCache) -> None:
    make_venv(tmp_path / "venv")
    archive = packed(tmp_path / "venv", tmp_path / "env.tar", "w")
    environment = environment_for(model(tmp_path, {}, {"EXECUTION_ENV_PATH": str(archive)}), cache)
    prefix = environment.python.parents[1]
    assert uses(environment) == (str(prefix), np.__version__)
    assert prefix != tmp_path / "venv"


def test_a_new_archive_is_a_new_environment(tmp_path: Path, cache: EnvironmentCache) -> None:
    site = make_venv(tmp_path / "venv")
    spec = model(tmp_path, {}, {"EXECUTION_ENV_PATH": str(tmp_path / "env.tar")})
    for value in (1, 2):
        (site / "conch_value.py").write_text(f"VALUE = {value}\n")
        packed(tmp_path / "venv", tmp_path / "env.tar", "w")
        environment = environment_for(spec, cache)
        assert run(environment, "__import__('conch_value').VALUE") == value
        environment.release()


def script(text: str) -> Callable[[Path], None]:
    def write(prefix: Path) -> None:
        (prefix / "bin" / "python").unlink()
        (prefix / "bin" / "python").write_text(text)
        (prefix / "bin" / "python").chmod(0o755)

    return write


def dangling(prefix: Path) -> None:
    (prefix / "bin" / "python").unlink()
    (prefix / "bin" / "python").symlink_to("/opt/no/such/python")


def without_numpy(prefix: Path) -> None:
    next(prefix.glob("lib/*/site-packages/*.pth")).unlink()


BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "old": (
        script(OLD),
        "is Python 3.8.18, but models run in Python 3.10 or newer; make the environment anew",
    ),
    "no numpy": (without_numpy, "models need numpy, which can't be imported there \\(ModuleNotFoundError: "),
    "old numpy": (
        script('#!/bin/sh\necho \'{"version": [3, 11, 1], "numpy": "1.22.4", "problem": null}\'\n'),
        "its numpy is 1.22.4, but models need 1.23 or newer; ",
    ),
    "moved": (dangling, "'bin/python' is a link to '/opt/no/such/python', which is not on this machine"),
    "crashes": (
        script("#!/bin/sh\necho broken >&2; exit 3\n"),
        "does not run as a Python .*code 3\\):\nbroken",
    ),
    "no program": (script("\x7fELF"), "/bin/python' can't be started: "),
    "says nothing": (script("#!/bin/sh\n"), "does not run as a Python interpreter \\(exit code 0\\)"),
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("as_archive", [False, True])
def test_what_cannot_run_models_is_said(
    tmp_path: Path, cache: EnvironmentCache, name: str, as_archive: bool
) -> None:
    breaks, text = BROKEN[name]
    make_venv(tmp_path / "env")
    breaks(tmp_path / "env")
    path = packed(tmp_path / "env", tmp_path / "env.tar.gz") if as_archive else tmp_path / "env"
    with pytest.raises(InvalidArgumentError, match=text) as caught:
        environment_for(model(tmp_path, {}, {"EXECUTION_ENV_PATH": str(path)}), cache)
    assert caught.value.message.startswith(f"model 'm', environment '{path}'")
    if as_archive:
        assert [path.name for path in cache.directory.iterdir()] == ["archives"]


def test_modules_in_the_working_directory_do_not_count(
    tmp_path: Path, cache: EnvironmentCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for workers."""
    for name in ("numpy", "json"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('not this one')\n")
    monkeypatch.chdir(tmp_path)
    make_venv(tmp_path / "venv")
    spec = model(tmp_path, {}, {"EXECUTION_ENV_PATH": str(tmp_path / "venv")})
    assert environment_for(spec, cache).version


@pytest.mark.parametrize("as_archive", [False, True])
def test_the_models_variables_count_for_whether_numpy_is_there(
    tmp_path: Path, cache: EnvironmentCache, as_archive: bool
) -> None:
    site = make_venv(tmp_path / "env", numpy=False)
    (site / "found.pth").write_text(
        "import os, sys; sys.path.append(os.environ.get('TEST_PLACE', '/none'))\n"
    )
    path = packed(tmp_path / "env", tmp_path / "env.tar.gz") if as_archive else tmp_path / "env"
    parameters = {"EXECUTION_ENV_PATH": str(path), "CONCH_ENV_TEST_PLACE": site_of_numpy()}
    with environment_released(environment_for(model(tmp_path, {}, parameters), cache)) as environment:
        assert run(environment, "__import__('numpy').__version__") == np.__version__
    with pytest.raises(InvalidArgumentError, match="models need numpy"):
        environment_for(model(tmp_path, {}, {"EXECUTION_ENV_PATH": str(path)}), cache)


def test_an_interpreter_that_hangs_is_killed_where_the_load_is_stopped(
    tmp_path: Path, cache: EnvironmentCache
) -> None:
    make_venv(tmp_path / "env")
    script(f'#!/bin/sh\necho $$ > "{tmp_path}/pid"\nsleep 600\n')(tmp_path / "env")
    spec = model(tmp_path, {}, {"EXECUTION_ENV_PATH": str(tmp_path / "env")})
    with (
        cancellable_load(lambda: bool(pid_in(tmp_path / "pid"))),
        pytest.raises(UnavailableError, match=r"^model 'm', environment '.*/env': the load was stopped"),
    ):
        environment_for(spec, cache)
    assert ended(pid_in(tmp_path / "pid"))


def test_what_activating_starts_is_not_waited_for(
    conda: Path, tmp_path: Path, cache: EnvironmentCache
) -> None:
    scripts = conda / "etc" / "conda" / "activate.d"
    (scripts / "agent.sh").write_text(f'sleep 600 &\necho $! > "{tmp_path}/pid"\n')
    assert environment_for(model(tmp_path, {}, {"EXECUTION_ENV_PATH": str(conda)}), cache).version
    assert eventually(lambda: ended(pid_in(tmp_path / "pid")), "the end of what activating has started")


def test_one_in_the_cache_that_runs_no_more_is_made_anew(
    tmp_path: Path, cache: EnvironmentCache, caplog: pytest.LogCaptureFixture
) -> None:
    """For example if its link to the interpreter dangles."""
    caplog.set_level("INFO")
    make_venv(tmp_path / "venv")
    archive = packed(tmp_path / "venv", tmp_path / "env.tar", "w")
    spec = model(tmp_path, {}, {"EXECUTION_ENV_PATH": str(archive)})
    first = environment_for(spec, cache)
    dangling(first.python.parents[1])
    with pytest.raises(InvalidArgumentError, match=r"is not on this machine.*; it is kept in '") as caught:
        environment_for(spec, cache)
    assert f"'{first.python.parents[2]}', which can be deleted" in caught.value.message
    first.release()
    with environment_released(environment_for(spec, cache)) as second:
        assert second.python == first.python
        assert run(second, "1") == 1
    assert "does not run any more and is removed" in caplog.text


def test_a_folder_without_an_interpreter_is_said(tmp_path: Path, cache: EnvironmentCache) -> None:
    with pytest.raises(InvalidArgumentError, match="there is no 'bin/python'; expected a conda environment"):
        environment_for(model(tmp_path, {}, {"EXECUTION_ENV_PATH": str(tmp_path)}), cache)


@pytest.fixture
def without_uv(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hides uv, as on a machine without it."""
    monkeypatch.setattr(Tools, "detect", classmethod(lambda cls: Tools((), True)))


FAKE_UV = """\
import os, subprocess, sys

arguments = sys.argv[1:]
with open(os.environ["CONCH_TEST_UV_LOG"], "a") as file:
    file.write(" ".join(arguments) + "\\n")
python = sys.executable
if arguments[0] == "venv":
    run = [python, "-m", "venv", "--without-pip", arguments[-1]]
elif arguments[0] == "sync":
    run = [python, "-m", "pip", "--python", os.environ["UV_PROJECT_ENVIRONMENT"] + "/bin/python", "install"]
    run += ["--no-index", "--find-links", os.environ["CONCH_TEST_WHEELS"], "conch_tiny==1.0"]
else:
    assert arguments[:4] == ["pip", "install", "--compile-bytecode", "--python"]
    del arguments[2]
    # uv reads a list's options as pip does, and a project's dependencies itself.
    rest = [argument for argument in arguments[4:]]
    if rest[:2] and rest[1:2] and rest[1].endswith(".toml"):
        rest = ["conch_tiny", *rest[2:]]
    run = [python, "-m", "pip", "--python", arguments[3], "install", *rest]
    run += ["--no-index", "--find-links", os.environ["CONCH_TEST_WHEELS"]]
sys.exit(subprocess.call(run))
"""


@pytest.fixture
def uv(tmp_path: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Puts a fake uv, based on pip, on PATH; returns the file with its command lines."""
    folder = tmp_path / "tools"
    folder.mkdir()
    (folder / "uv").write_text(f"#!{sys.executable}\n{FAKE_UV}")
    (folder / "uv").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("CONCH_TEST_UV_LOG", str(tmp_path / "uv.log"))
    monkeypatch.setenv("CONCH_TEST_WHEELS", str(wheels))
    return tmp_path / "uv.log"


@pytest.mark.usefixtures("without_uv")
def test_requirements_are_installed_once(
    tmp_path: Path, cache: EnvironmentCache, wheels: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    spec = model(tmp_path, {"requirements.txt": only(wheels, "conch_needs")})
    environment = environment_for(spec, cache)
    assert run(environment, "__import__('conch_tiny').VERSION") == 1
    assert environment.label == f"model 'm', environment of '{spec.directory}/requirements.txt'"
    assert any("Successfully installed" in record.getMessage() for record in caplog.records)
    caplog.clear()
    again = model(tmp_path, {"requirements.txt": only(wheels, "conch_needs")}, name="o")
    other = environment_for(again, cache)
    assert other.python == environment.python
    assert not caplog.records
    other.release()
    assert uses(environment) == (str(environment.python.parents[1]), np.__version__)
    (entry,) = (path for path in cache.directory.iterdir() if path.is_dir())
    assert sorted(path.name for path in entry.iterdir()) == ["complete.json", "env"]


@pytest.mark.usefixtures("without_uv")
def test_the_servers_own_packages_are_not_there(
    tmp_path: Path, cache: EnvironmentCache, wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel(wheels, "numpy", "1.23.0", {"numpy/__init__.py": "__version__ = '1.23.0'\n"})
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    environment = environment_for(model(tmp_path, {"requirements.txt": only(wheels, "numpy<1.24")}), cache)
    assert uses(environment)[1] == "1.23.0"
    with pytest.raises(subprocess.CalledProcessError):
        run(environment, "__import__('grpc').__name__")


@pytest.mark.usefixtures("without_uv")
def test_dependencies_of_a_script(
    tmp_path: Path, cache: EnvironmentCache, wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    text = '# /// script\n# dependencies = ["conch_tiny"]\n# ///\n'
    environment = environment_for(model(tmp_path, {"1/model.py": text}), cache)
    assert run(environment, "__import__('conch_tiny').VERSION") == 2
    environment.release()


@pytest.mark.usefixtures("without_uv")
def test_a_failure_says_what_the_tool_said(tmp_path: Path, cache: EnvironmentCache, wheels: Path) -> None:
    spec = model(tmp_path, {"requirements.txt": only(wheels, "conch_missing==3")})
    with pytest.raises(InternalError) as caught:
        environment_for(spec, cache)
    message = caught.value.message
    assert message.startswith(f"model 'm', environment of '{spec.directory}/requirements.txt': ")
    assert "ended with exit code 1:\n" in message
    assert "No matching distribution found for conch_missing==3" in message
    assert list(cache.directory.iterdir()) == []


@pytest.mark.usefixtures("without_uv")
def test_a_file_that_changes_meanwhile_is_noticed(
    tmp_path: Path, cache: EnvironmentCache, wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = model(tmp_path, {"requirements.txt": only(wheels, "conch_tiny")})
    original = run_tool

    def run_and_change(*arguments: Any) -> None:
        original(*arguments)
        (spec.directory / "requirements.txt").write_text("")

    monkeypatch.setattr(building_module, "run_tool", run_and_change)
    with pytest.raises(UnavailableError, match="the file was changed while the environment was built"):
        environment_for(spec, cache)
    assert list(cache.directory.iterdir()) == []


@pytest.mark.usefixtures("without_uv")
def test_a_wheel_that_changes_meanwhile_is_noticed(
    tmp_path: Path, cache: EnvironmentCache, wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = wheels / "conch_tiny-1.0-py3-none-any.whl"
    spec = model(tmp_path, {"requirements.txt": only(wheels, f"conch_tiny @ file://{named}")})
    original = run_tool

    def run_and_change(*arguments: Any) -> None:
        original(*arguments)
        wheel(wheels, "conch_tiny", "1.0", {"conch_tiny.py": "VERSION = 'another'\n"})

    monkeypatch.setattr(building_module, "run_tool", run_and_change)
    with pytest.raises(UnavailableError, match="a wheel was changed while the environment was built"):
        environment_for(spec, cache)
    monkeypatch.setattr(building_module, "run_tool", original)
    with environment_released(environment_for(spec, cache)) as environment:
        assert run(environment, "__import__('conch_tiny').VERSION") == "another"


def test_uv_is_used_where_it_is(tmp_path: Path, cache: EnvironmentCache, wheels: Path, uv: Path) -> None:
    spec = model(tmp_path, {"requirements.txt": only(wheels, "conch_tiny<2")})
    environment = environment_for(spec, cache)
    assert run(environment, "__import__('conch_tiny').VERSION") == 1
    prefix, _ = uses(environment)
    assert uv.read_text().splitlines() == [
        f"venv --no-project --python {sys.executable} {prefix}",
        f"pip install --compile-bytecode --python {prefix}/bin/python -r {spec.directory}/requirements.txt "
        "numpy",
    ]


PROJECT = '[project]\nname = "m"\nversion = "1"\ndependencies = ["conch_tiny"]\n'


@pytest.mark.parametrize(
    ("files", "commands"),
    [
        (
            {"pyproject.toml": PROJECT, "uv.lock": "version = 1\n"},
            [
                "venv --no-project --python {python} {env}",
                "sync --frozen --no-dev --no-install-project --compile-bytecode --python {env}/bin/python "
                "--project {model}",
                "pip install --compile-bytecode --python {env}/bin/python numpy",
            ],
        ),
        (
            {"pyproject.toml": PROJECT},
            [
                "venv --no-project --python {python} {env}",
                "pip install --compile-bytecode --python {env}/bin/python -r {model}/pyproject.toml numpy",
            ],
        ),
        (
            {"pyproject.toml": PROJECT.replace('name = "m"\n', "")},
            [
                "venv --no-project --python {python} {env}",
                "pip install --compile-bytecode --python {env}/bin/python -r {folder}/requirements.txt numpy",
            ],
        ),
        (
            {"pylock.toml": 'lock-version = "1.0"\n'},
            [
                "venv --no-project --python {python} {env}",
                "pip install --compile-bytecode --python {env}/bin/python -r {model}/pylock.toml",
                "pip install --compile-bytecode --python {env}/bin/python numpy",
            ],
        ),
        (
            {"1/pyproject.toml": PROJECT + 'requires-python = "==3.77.*"\n'},
            [
                "venv --no-project --python ==3.77.*,>=3.10 {env}",
                "pip install --compile-bytecode --python {env}/bin/python -r {model}/1/pyproject.toml numpy",
            ],
        ),
    ],
    ids=["uv.lock", "project", "project without a name", "pylock", "another Python"],
)
def test_projects_and_locks(
    tmp_path: Path, cache: EnvironmentCache, uv: Path, files: dict[str, str], commands: list[str]
) -> None:
    spec = model(tmp_path, files)
    environment = environment_for(spec, cache)
    prefix, _ = uses(environment)
    names = {"python": sys.executable, "env": prefix, "folder": Path(prefix).parent, "model": spec.directory}
    assert uv.read_text().splitlines() == [command.format(**names) for command in commands]


@pytest.mark.usefixtures("without_uv")
@pytest.mark.parametrize(
    ("files", "text"),
    [
        (
            {"pyproject.toml": PROJECT, "uv.lock": ""},
            "uv.lock needs uv, which is neither on the server's PATH",
        ),
        ({"pylock.toml": ""}, "pylock.toml needs uv, "),
        (
            {"pyproject.toml": PROJECT + 'requires-python = "<3"'},
            "it requires Python '<3', but the server runs in 3.*; put uv on the server's PATH",
        ),
        (
            {"pyproject.toml": PROJECT + 'requires-python = "three"'},
            "'three' in requires-python 'three' is no version of Python",
        ),
    ],
)
def test_what_only_uv_can_do_is_said(
    tmp_path: Path, cache: EnvironmentCache, files: dict[str, str], text: str
) -> None:
    with pytest.raises(ConchError, match=text):
        environment_for(model(tmp_path, files), cache)
    assert list(cache.directory.iterdir()) == []


def test_building_can_be_refused(tmp_path: Path, cache: EnvironmentCache) -> None:
    spec = model(tmp_path, {"requirements.txt": "x"}, options={"build-environments": "false"})
    with pytest.raises(UnsupportedError, match="build-environments=false, so no packages are installed"):
        environment_for(spec, cache)
    assert not cache.directory.exists()


def sleeper(tmp_path: Path) -> list[str]:
    code = "import os, sys, time\nopen(sys.argv[1], 'w').write(str(os.getpid()))\ntime.sleep(600)"
    return [sys.executable, "-c", code, str(tmp_path / "pid")]


def pid_in(path: Path) -> int:
    return int(eventually(lambda: path.exists() and path.read_text(), "the tool's process"))


def ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_a_tool_that_is_not_wanted_any_more_is_killed(tmp_path: Path) -> None:
    started = tmp_path / "pid"
    with pytest.raises(UnavailableError, match=r"^x: the load was stopped while its environment was made"):
        run_tool(
            ["sh", "-c", '"$0" "$@"; true', *sleeper(tmp_path)],
            "x",
            tmp_path,
            os.environ,
            stopped=lambda: started.exists() and bool(started.read_text()),
        )
    assert eventually(lambda: ended(pid_in(started)), "the end of the tool's child")


def test_a_tool_does_not_outlive_the_server(tmp_path: Path) -> None:
    code = (
        "import os, sys\nfrom pathlib import Path\nfrom conch_environments.tools import run_tool\n"
        "run_tool(sys.argv[1:], 'x', Path('.'), os.environ)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code, *sleeper(tmp_path)]
    with subprocess.Popen(command, env=environment) as server:
        pid = pid_in(tmp_path / "pid")
        server.send_signal(signal.SIGKILL)
    assert eventually(lambda: ended(pid), "the end of the tool")


def test_what_a_tool_leaves_running_is_not_waited_for(tmp_path: Path) -> None:
    child = "import subprocess, sys; subprocess.Popen(sys.argv[1:])"
    run_tool([sys.executable, "-c", child, *sleeper(tmp_path)], "x", tmp_path, os.environ)
    os.kill(pid_in(tmp_path / "pid"), signal.SIGKILL)


CHATTY = "import os, sys, time\nopen(sys.argv[1], 'w').write(str(os.getpid()))\nwhile True: print('x' * 9999)"


def leaving(tmp_path: Path, end: str) -> list[str]:
    """Command of a tool that ends at once and leaves a printing child."""
    code = (
        "import subprocess, sys, time\nfrom pathlib import Path\nsubprocess.Popen(sys.argv[1:])\n"
        f"while not Path(sys.argv[-1]).exists(): time.sleep(0.01)\n{end}"
    )
    return [sys.executable, "-c", code, sys.executable, "-c", CHATTY, str(tmp_path / "pid")]


def test_what_goes_on_printing_is_not_waited_for(tmp_path: Path) -> None:
    end = time.monotonic() + WAIT_S
    run_tool(leaving(tmp_path, ""), "x", tmp_path, os.environ, stopped=lambda: time.monotonic() > end)
    try:
        os.kill(pid_in(tmp_path / "pid"), signal.SIGKILL)
    except ProcessLookupError:
        pass  # its output pipe broke before


def test_what_a_tool_that_fails_has_started_is_killed(tmp_path: Path) -> None:
    with pytest.raises(InternalError, match="ended with exit code 3:"):
        run_tool(leaving(tmp_path, "sys.exit(3)"), "x", tmp_path, os.environ)
    assert eventually(lambda: ended(pid_in(tmp_path / "pid")), "the end of the tool's child")


def test_what_a_tool_has_left_is_killed_where_the_load_is_stopped(tmp_path: Path) -> None:
    """Even after the tool has ended, before its exit is noticed."""
    with pytest.raises(UnavailableError, match="the load was stopped"):
        run_tool(
            ["sh", "-c", '"$0" "$@" & exit 0', *sleeper(tmp_path)],
            "x",
            tmp_path,
            os.environ,
            stopped=lambda: bool(pid_in(tmp_path / "pid")),
        )
    assert eventually(lambda: ended(pid_in(tmp_path / "pid")), "the end of the tool's child")


def test_tools_end_when_nobody_reads_what_they_say(tmp_path: Path) -> None:
    with pytest.raises(InternalError, match="was killed by signal 13"):
        run_tool(["sh", "-c", "kill -PIPE $$; exit 0"], "x", tmp_path, os.environ)


def test_progress_is_logged_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    times: Iterator[int] = iter([0, 10**8, 10**9, 10**9 + 1, 3 * 10**9])
    output = Output("x", lambda: next(times))
    caplog.set_level("INFO")
    output.add(b"one\ntw")
    output.add(b"o\rthree\n\nfour\nfi\xff")
    output.end()
    assert [record.getMessage() for record in caplog.records] == ["x: one", "x: three", "x: fi\\xff"]
    assert output.tail == "one\ntwo\nthree\nfour\nfi\\xff"


def test_endless_output_is_cut(caplog: pytest.LogCaptureFixture) -> None:
    output = Output("x", lambda: 0)
    for _ in range(1000):
        output.add(b"y" * 1000)
    for number in range(100):
        output.add(f"{number}\n".encode())
    assert output.tail.splitlines() == [str(number) for number in range(80, 100)]


@pytest.mark.usefixtures("without_uv")
def test_several_models_at_once_build_once(
    tmp_path: Path, cache: EnvironmentCache, wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builds: list[str] = []
    original = run_tool

    def counted(command: Any, *arguments: Any) -> None:
        builds.append(command[2])
        original(command, *arguments)

    monkeypatch.setattr(building_module, "run_tool", counted)
    files = {"requirements.txt": only(wheels, "conch_tiny")}
    specs = [model(tmp_path, files, name=f"m{number}") for number in range(4)]
    with ThreadPoolExecutor(len(specs)) as pool:
        found = list(pool.map(lambda spec: environment_for(spec, cache), specs))
    assert builds == ["venv", "pip"]
    assert len({environment.python for environment in found}) == 1
    for environment in found:
        environment.release()


@pytest.mark.usefixtures("without_uv")
def test_a_load_that_is_stopped_builds_no_further(
    tmp_path: Path, cache: EnvironmentCache, wheels: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    spec = model(tmp_path, {"requirements.txt": only(wheels, "conch_tiny")})

    def stopped() -> bool:
        return any("'pip'" in record.getMessage() for record in caplog.records)

    with cancellable_load(stopped), pytest.raises(UnavailableError, match="the load was stopped while its"):
        environment_for(spec, cache)
    assert list(cache.directory.iterdir()) == []
