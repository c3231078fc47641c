from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.core import make_spec

from conch.backends.python.python_settings import OWN_HANG, Settings
from conch.core.errors import InvalidArgumentError
from conch.workers.python_based import PythonBasedBackend

PARAMETERS = {
    "CONCH_PLACEMENT": "worker",
    "CONCH_MAX_INFLIGHT": "4",
    "CONCH_MAX_EXECUTION_SECONDS": "1.5",
    "CONCH_MEMORY_LIMIT_MB": "512",
    "CONCH_PROCESS_LIMIT": "30",
    "CONCH_START_TIMEOUT_SECONDS": "60",
    "CONCH_HANG_SECONDS": "45",
}
OPTIONS = {
    "placement": "worker",
    "max-inflight": "4",
    "max-execution-seconds": "1.5",
    "memory-limit-mb": "512",
    "process-limit": "30",
    "start-timeout-seconds": "60",
    "hang-seconds": "45",
}
WANTED = Settings("worker", 4, 1.5, 512, 30, 60.0, hang_s=45.0)


@pytest.mark.parametrize(
    ("parameters", "options"), [(PARAMETERS, {}), ({}, OPTIONS), (PARAMETERS, {"max-inflight": "x"})]
)
def test_a_parameter_comes_before_an_option(parameters: dict[str, str], options: dict[str, str]) -> None:
    assert Settings.read("m", parameters, options) == WANTED


def test_a_backend_may_have_a_time_of_its_own_for_silent_loops() -> None:
    assert Settings.read("m", {}, {OWN_HANG: "60"}) == Settings(hang_s=60.0)
    assert Settings.read("m", {"CONCH_HANG_SECONDS": "5"}, {OWN_HANG: "60"}).hang_s == 5


def test_with_nothing_said_nothing_is_limited() -> None:
    assert Settings.read("m", {}, {}) == Settings()


@pytest.mark.parametrize("key", PARAMETERS)
@pytest.mark.parametrize(
    "value", ["", "0", "-1", "nan", "inf", "Worker", "1e999", "\u00b3", "\u0664", "1" + 20 * "0"]
)
def test_a_wrong_parameter_is_named(key: str, value: str) -> None:
    with pytest.raises(
        InvalidArgumentError, match=f"^model 'm': parameter '{key}' must be .*, not '{value}'$"
    ):
        Settings.read("m", {key: value}, OPTIONS)


@pytest.mark.parametrize("key", [key for key in PARAMETERS if key != "CONCH_PLACEMENT"])
def test_a_number_beyond_all_sense_is_refused_briefly(key: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"'{key}' must be .* and up to ") as caught:
        Settings.read("m", {key: "9" * 5000}, {})
    assert len(caught.value.message) < 200


@pytest.mark.parametrize("key", OPTIONS)
def test_a_wrong_option_is_named(key: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"^--backend-config=python,{key} must be "):
        Settings.read("m", {}, {key: "many"})


@pytest.mark.parametrize("comment", ["", "# /// script\n# dependencies = []\n# ///\n"])
def test_a_backend_of_python_code_checks_the_code_that_it_would_run(tmp_path: Path, comment: str) -> None:
    """The comment asks for an environment, and so for a process of its own, which limits need."""
    (tmp_path / "backend").mkdir()
    (tmp_path / "backend" / "model.py").write_text(comment)
    (tmp_path / "m" / "1").mkdir(parents=True)
    spec = replace(
        make_spec(),
        directory=tmp_path / "m",
        version_directory=tmp_path / "m" / "1",
        model_file="model.py",
        parameters={"CONCH_MEMORY_LIMIT_MB": "500", **({} if comment else {"CONCH_PLACEMENT": "in_process"})},
    )
    backend = PythonBasedBackend(tmp_path / "backend")
    if comment:
        backend.check(spec)
    else:
        with pytest.raises(InvalidArgumentError, match="a process of the model's own"):
            backend.check(spec)
