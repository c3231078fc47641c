"""Airflow in an environment of its own: operators one by one (see `airflow_tasks`), and whole DAGs."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.support.servers import ROOT

ENVIRONMENT = Path(os.environ.get("CONCH_AIRFLOW", Path.home() / ".cache/conch-tests/airflow"))
"""Environment in which `tests/setup_airflow.sh` has installed Airflow."""

WITH_AIRFLOW = [
    pytest.mark.airflow,
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.skipif(
        not (ENVIRONMENT / ".ready").exists(), reason="tests/setup_airflow.sh makes its environment"
    ),
]
"""Marks of tests that need it."""

_SCRIPT = Path(__file__).with_name("airflow_tasks.py")
_MARK = "ANSWER "
_DAG_S = 300.0


class TaskError(Exception):
    """An operator has failed; class and text of its error."""


class AirflowTasks:
    """Runs operators, hooks and sensors against one server after another."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.connection = ""

    def __call__(self, what: str, **arguments: Any) -> Any:
        """Runs an operator with `connection` as its server; raises TaskError."""
        assert self._process.stdin is not None and self._process.stdout is not None
        variables = {"AIRFLOW_CONN_CONCH_DEFAULT": self.connection}
        self._process.stdin.write(json.dumps([what, variables, arguments]) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:  # Airflow logs there, too
            if line.startswith(_MARK):
                answer = json.loads(line.removeprefix(_MARK))
                if "error" in answer:
                    raise TaskError(answer["error"])
                return answer["result"]
        raise AssertionError("Airflow's process has ended")


@contextmanager
def airflow_tasks(home: Path) -> Iterator[AirflowTasks]:
    """A process of Airflow's environment, until the end of the block."""
    with subprocess.Popen(
        [str(ENVIRONMENT / "bin/python"), str(_SCRIPT)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=_variables(home),
    ) as process:
        yield AirflowTasks(process)


class AirflowDags:
    """Runs DAGs of a folder with a database of their own.

    Args:
        home: Directory to which Airflow writes.
        dags: The folder.
    """

    def __init__(self, home: Path, dags: Path) -> None:
        self._variables = {**_variables(home), "AIRFLOW__CORE__DAGS_FOLDER": str(dags)}
        self._airflow("db", "migrate").check_returncode()

    def test(self, dag: str, connection: str, conf: Mapping[str, Any]) -> tuple[bool, str]:
        """Runs ``airflow dags test``; whether the run has succeeded, and what it has printed."""
        self._variables["AIRFLOW_CONN_CONCH_DEFAULT"] = connection
        found = self._airflow("dags", "test", dag, "--conf", json.dumps(conf))
        return found.returncode == 0, found.stdout

    def _airflow(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(ENVIRONMENT / "bin/airflow"), *arguments],
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_DAG_S,
            env=self._variables,
        )


def _variables(home: Path) -> dict[str, str]:
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("AIRFLOW", "CONCH_"))}
    return {
        **inherited,
        "AIRFLOW_HOME": str(home),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "PYTHONPATH": str(ROOT / "services/airflow_provider_conch"),
        "PATH": f"{ENVIRONMENT / 'bin'}:{os.environ['PATH']}",
    }
