"""Path of a worker's modules, before any of the server's is imported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import conch

pytestmark = pytest.mark.process

SERVICES = Path(conch.__file__).parents[1]

LOOK = """
import importlib.util, json, sys
print(json.dumps([sys.path, importlib.util.find_spec("hosted_requests") is not None]))
sys.exit()
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package in conch's place that says what the first of its modules that is imported sees."""
    folder = tmp_path / "package"
    (folder / "core").mkdir(parents=True)
    for each in (folder, folder / "core"):
        (each / "__init__.py").write_text("")
    (folder / "core" / "process_setup.py").write_text(LOOK)
    return folder


@pytest.mark.parametrize("linked", ["nothing", "the parent of the package", "the script"])
def test_a_model_does_not_find_the_workers_own_modules(tmp_path: Path, package: Path, linked: str) -> None:
    """They have names such as `requests` and `metrics`; however the script is reached."""
    main = SERVICES / "conch" / "workers" / "host" / "main.py"
    if linked == "the parent of the package":
        (tmp_path / "current").symlink_to(SERVICES)
        main = tmp_path / "current" / main.relative_to(SERVICES)
    elif linked == "the script":
        (tmp_path / "main.py").symlink_to(main)
        main = tmp_path / "main.py"
    command = [
        sys.executable,
        main,
        "0",
        package,
        SERVICES / "triton_python_backend_utils.py",
        '{"functions": [], "packages": {}}',
        "/last",
    ]
    done = subprocess.run([*map(str, command)], capture_output=True, check=True, text=True)
    path, found = json.loads(done.stdout)
    assert not found, path
    assert path[-1] == "/last"
