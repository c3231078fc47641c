"""Runs the quick tests on each Python of this machine: ``python scripts/test_pythons.py [PYTHON ...]``.

Without arguments these are ``python3.11`` and later on PATH, and pyenv's. Each gets an environment in
``build/pythons`` with the packages that have wheels for it; PyTorch only where its wheel is one for CPUs. The
output ends with each Python's version, results, and what was left out or skipped, and why.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from ast import literal_eval
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "pythons"
OLDEST = (3, 11)
# For linters and pages, which one Python does for all.
NOT_NEEDED = frozenset({"lint", "docs"})
PIP = ("-m", "pip", "--disable-pip-version-check")
TESTS = ("-m", "pytest", "-q", "-n", "3", "--dist", "loadfile", "--no-loadscope-reorder")


def version_of(python: str) -> str:
    """The version of an interpreter; empty if it does not run."""
    code = "import platform; print(platform.python_version())"
    try:
        return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def candidates() -> Iterator[str]:
    """Interpreters that may be here."""
    for minor in range(OLDEST[1], 30):
        for folder in os.environ.get("PATH", "").split(os.pathsep):
            yield str(Path(folder, f"python{OLDEST[0]}.{minor}"))
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    yield from map(str, sorted(pyenv.glob("versions/*/bin/python3")))


def interpreters(names: Sequence[str]) -> dict[str, str]:
    """The interpreters that are named, or all that are here, by version, oldest first."""
    found: dict[str, str] = {}
    for name in names or candidates():
        version = version_of(name) if shutil.which(name) else ""
        if version:
            found.setdefault(version, name)
        elif names:
            sys.exit(f"{name} is no Python that runs here")
    order = {version: tuple(map(int, re.findall(r"\d+", version))) for version in found}
    return {
        version: found[version]
        for version in sorted(order, key=order.__getitem__)
        if order[version] >= OLDEST
    }


def requirements(extras: dict[str, list[str]], name: str = "dev") -> list[str]:
    """The packages of an extra and of those that it names, without repetition."""
    found: dict[str, None] = {}
    for each in extras[name]:
        if each.startswith("conch["):
            for inner in each[len("conch[") : -1].split(","):
                if inner not in NOT_NEEDED:
                    found |= dict.fromkeys(requirements(extras, inner))
        else:
            found[each] = None
    return list(found)


def pip(python: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs pip in an environment, with the versions of constraints.txt."""
    return subprocess.run([python, *PIP, *arguments], capture_output=True, text=True, check=False, cwd=ROOT)


def install(python: Path, wanted: list[str]) -> dict[str, str]:
    """Installs conch and the packages that have wheels; gives the others with the reason."""
    wheels = ("install", "--only-binary", ":all:", "-c", "constraints.txt")
    left_out: dict[str, str] = {}
    offered = pip(python, "index", "versions", "torch").stdout
    for each in [each for each in wanted if each.startswith("torch")]:
        if f"{pinned('torch')}+cpu" not in offered:
            left_out[each] = "no wheel for CPUs alone"
    together = [each for each in wanted if each not in left_out]
    if pip(python, *wheels, "-e", ".", *together).returncode:
        for each in together:
            alone = pip(python, *wheels, "--dry-run", each)
            if alone.returncode:
                left_out[each] = reason(alone.stdout + alone.stderr)
        some = pip(python, *wheels, "-e", ".", *(each for each in together if each not in left_out))
        if some.returncode:
            left_out["conch"] = reason(some.stdout + some.stderr)
    return left_out


def pinned(package: str) -> str:
    """The version of a package that constraints.txt has for all Pythons."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return next(line.partition("==")[2] for line in lines if line.startswith(f"{package}=="))


def reason(errors: str) -> str:
    """The package that has no wheel, or else the last error of pip."""
    lines = [line.strip() for line in errors.splitlines()]
    for before, line in pairwise(lines):
        if "no matching distributions available" in before:
            return f"no wheel of {line}"
    return next((line for line in reversed(lines) if line.startswith("ERROR")), "pip failed")


def environment(python: str, version: str) -> tuple[Path, dict[str, str]]:
    """The interpreter of a version's environment, which is made anew if what defines it has changed."""
    folder = FOLDER / version
    inside, stamp = folder / "bin" / "python", folder / "left-out.json"
    files = (ROOT / "pyproject.toml", ROOT / "constraints.txt")
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
    if stamp.is_file():
        known = json.loads(stamp.read_text())
        if known["of"] == digest:
            return inside, known["left_out"]
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([python, "-m", "venv", folder], check=True)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    left_out = install(inside, requirements(extras))
    if "conch" not in left_out:
        stamp.write_text(json.dumps({"of": digest, "left_out": left_out}))
    return inside, left_out


def results(report: Path) -> tuple[Counter[str], Counter[str], list[str]]:
    """Numbers of tests by outcome, reasons of skips with their numbers, and names of failed tests."""
    outcomes: Counter[str] = Counter()
    skips: Counter[str] = Counter()
    failed = []
    for case in ElementTree.parse(report).iter("testcase"):
        skip = case.find("skipped")
        wrong = case.find("failure") is not None or case.find("error") is not None
        outcomes["failed" if wrong else "passed" if skip is None else "skipped"] += 1
        if wrong:
            failed.append(f"{case.get('classname')}::{case.get('name')}")
        elif skip is not None:
            why = skip.get("message", "")
            if why == "collection skipped":  # a whole file: its path, line and reason
                why = literal_eval(skip.text or "")[2].removeprefix("Skipped: ")
            skips[why] += 1
    return outcomes, skips, failed


def run(python: str, version: str) -> tuple[bool, list[str]]:
    """Runs the tests on one Python; gives whether all passed, and the lines of the summary."""
    inside, left_out = environment(python, version)
    lines = [f"  left out: {each}: {why}" for each, why in left_out.items()]
    if "conch" in left_out:
        return False, [f"{version} ({python}): conch does not install", *lines]
    report, log = FOLDER / f"{version}.xml", FOLDER / f"{version}.log"
    report.unlink(missing_ok=True)
    with log.open("w") as output:
        command = [str(inside), *TESTS, "-m", "not slow and not process", f"--junitxml={report}"]
        done = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False, cwd=ROOT)
    if not report.is_file():
        return False, [f"{version} ({python}): the tests did not run, see {log.relative_to(ROOT)}", *lines]
    outcomes, skips, failed = results(report)
    numbers = ", ".join(f"{outcomes[each]} {each}" for each in ("passed", "failed", "skipped"))
    lines += [f"  failed: {name}" for name in failed]
    lines += [f"  skipped {count}: {why}" for why, count in skips.most_common()]
    return done.returncode == 0, [f"{version} ({python}): {numbers}", *lines]


def main() -> None:
    """Runs the tests on all; ends with 1 if any fails."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    found = interpreters(sys.argv[1:])
    if not found:
        sys.exit("there is no Python 3.11 or newer on PATH or in pyenv")
    whole = True
    summary: list[str] = []
    for version, python in found.items():
        print(
            f"Python {version}: environment and tests in {FOLDER.relative_to(ROOT)}/{version} ...", flush=True
        )
        passed, lines = run(python, version)
        print("\n".join(lines), flush=True)
        summary += lines
        whole = whole and passed
    print("\n".join(["", *summary]))
    sys.exit(not whole)


if __name__ == "__main__":
    main()
