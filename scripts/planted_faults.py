"""Plants faults, one at a time, and says which tests find each: ``python scripts/planted_faults.py``.

`planted_faults.toml` has the faults: a text that occurs once in a file, its replacement, and the tests most
likely to fail. Those of the quick set run first (`test`), then all of them (`test-all`). The table goes into
``docs/testing.md``. The script fails if a text does not occur exactly once, if nothing finds a fault, or if
`make test` finds fewer than `LEAST_QUICK`.

``--check`` only looks for the texts; ``--only NAME`` plants some of the faults and writes no table;
``--whole`` runs the whole sets where the named tests find nothing.
Owns: temporary copies of the checkout, one for each job, with one fault each.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parents[1]
FAULTS = "scripts/planted_faults.toml"
TABLE = "docs/testing.md"
BEGIN, END = "<!-- planted faults -->", "<!-- end of planted faults -->"
LEAST_FAULTS, LEAST_QUICK = 180, 170
QUICK = ("-m", "not slow and not process")
# Without those of distributions of their own: tests compile or copy them from the checkout.
MODULES = {
    each.parent.name: folder
    for folder in ("services", "control")
    for each in sorted((ROOT / folder).glob("conch*/__init__.py"))
}
_TEST_S, _HINTS_S, _WHOLE_S = 30, 120, 3600
_PASSED, _FAILED, _NONE_SELECTED = 0, 1, 5
# From the lines of `-v`: a summary is missing where `-x` leaves a server of the session running.
_FOUND = re.compile(r"^(tests/\S+?::.*?) (?:FAILED|ERROR)\b", re.MULTILINE)
_WITHOUT_TEST = "(time limit)"


class FaultError(Exception):
    """A fault can't be planted, or its tests can't run."""


@dataclass(frozen=True)
class Fault:
    """One fault; `tests` are files or node ids."""

    name: str
    area: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


@dataclass(frozen=True)
class Finding:
    """The set that finds a fault, "nothing" if none does, and the first test that fails."""

    fault: Fault
    found_by: str
    test: str


def load(root: Path) -> list[Fault]:
    """The faults of a checkout, in the order of the file."""
    entries = tomllib.loads((root / FAULTS).read_text())["fault"]
    faults = [Fault(**{**entry, "tests": tuple(entry["tests"])}) for entry in entries]
    if len({fault.name for fault in faults}) != len(faults):
        raise FaultError("two faults have the same name")
    return faults


def planted(root: Path, fault: Fault) -> str:
    """The text of the fault's file with the fault."""
    path = root / fault.file
    text = path.read_text() if path.is_file() else ""
    count = text.count(fault.old)
    if count != 1:
        raise FaultError(
            f"{fault.name}: its text occurs {count} times in {fault.file}; change the fault in {FAULTS}"
        )
    if fault.old == fault.new:
        raise FaultError(f"{fault.name}: changes nothing; change the fault in {FAULTS}")
    return text.replace(fault.old, fault.new)


def mistakes(root: Path, faults: Sequence[Fault]) -> list[str]:
    """The faults that can't be planted, and the tests that do not exist."""
    found = []
    for fault in faults:
        try:
            text = planted(root, fault)
            if fault.file.endswith(".py"):
                compile(text, fault.file, "exec")
        except FaultError as error:
            found.append(str(error))
        except SyntaxError as error:
            found.append(f"{fault.name}: makes no valid code, {error}; change the fault in {FAULTS}")
        if not fault.tests:
            found.append(f"{fault.name}: names no test; add those most likely to fail in {FAULTS}")
        for test in fault.tests:
            if not (root / test.partition("::")[0]).is_file():
                found.append(f"{fault.name}: there is no {test}; change the fault in {FAULTS}")
    return found


class Copy:
    """A copy of the checkout, and what runs tests in it."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._changes = 0
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for name in filter(None, listed.split("\0")):
            source, target = ROOT / name, place / name
            if source.is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target)
            elif source.is_dir():  # versions of models may be empty directories
                target.mkdir(parents=True, exist_ok=True)
        # In front of site-packages, where the environment has links to the checkout and a copy of the stub.
        paths = [place / "services", place / "control", place]
        self._environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "HYPOTHESIS_PROFILE": "faults",
        }
        self._environment.pop("PYTHONDONTWRITEBYTECODE", None)
        self._check_imports()

    def find(self, fault: Fault, whole: bool) -> Finding:
        """Plants a fault and looks for a test that fails, and fails again alone."""
        runs: list[tuple[str, list[str], float]] = [
            ("test", [*QUICK, *fault.tests], _HINTS_S),
            ("test-all", [*fault.tests], _HINTS_S),
        ]
        if whole:
            runs += [("test", [*QUICK], _WHOLE_S), ("test-all", [], _WHOLE_S)]
        with self._with(fault):
            for name, arguments, limit_s in runs:
                failing = self.failures(["-x", *arguments], limit_s)
                if failing and (failing == [_WITHOUT_TEST] or self.failures(failing, _HINTS_S)):
                    return Finding(fault, name, failing[0])
        return Finding(fault, "nothing", "")

    def sound(self, arguments: Sequence[str]) -> list[str]:
        """The tests that fail without a fault, and fail again alone; others do on a busy machine."""
        failing = self.failures(arguments, _WHOLE_S)
        return self.failures(failing, _WHOLE_S) if failing and failing != [_WITHOUT_TEST] else failing

    def failures(self, arguments: Sequence[str], limit_s: float) -> list[str]:
        """The tests that fail."""
        command = [sys.executable, "-m", "pytest", "-v", "-n", "0", "-p", "no:cacheprovider"]
        with subprocess.Popen(
            [*command, f"--timeout={_TEST_S}", *arguments],
            cwd=self._place,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as process:
            try:
                output, _ = process.communicate(timeout=limit_s)
            except subprocess.TimeoutExpired:
                output = ""
            finally:  # also servers and workers of a test that was cut off
                _kill_group(process.pid)
        if process.returncode in (_PASSED, _NONE_SELECTED):
            return []
        if named := _FOUND.findall(output):
            return list(dict.fromkeys(named))
        if process.returncode == _FAILED or process.returncode < 0:
            return [_WITHOUT_TEST]
        raise FaultError(f"pytest {' '.join(arguments)} did not run:\n{output[-3000:]}")

    @contextmanager
    def _with(self, fault: Fault) -> Iterator[None]:
        path = self._place / fault.file
        sound, faulty = path.read_text(), planted(self._place, fault)
        self._write(path, faulty)
        try:
            yield
        finally:
            self._write(path, sound)

    def _write(self, path: Path, text: str) -> None:
        """Writes a file with a distinct mtime: Python recompiles by seconds and size."""
        self._changes += 1
        path.write_text(text)
        seconds = time.time() + 10 * self._changes
        os.utime(path, (seconds, seconds))

    def _check_imports(self) -> None:
        code = "import importlib.util as u, sys; print(*(u.find_spec(each).origin for each in sys.argv[1:]))"
        shown = subprocess.run(
            [sys.executable, "-c", code, *MODULES],
            cwd=self._place,
            env=self._environment,
            check=True,
            capture_output=True,
            text=True,
        ).stdout.split()
        for name, folder, origin in zip(MODULES, MODULES.values(), shown, strict=True):
            if not Path(origin).resolve().is_relative_to((self._place / folder).resolve()):
                raise FaultError(f"{name} is imported from {origin}, not from the copy")


def _kill_group(leader: int) -> None:
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        pass


def find_all(faults: Sequence[Fault], jobs: int, whole: bool) -> list[Finding]:
    """Plants all faults, several at a time in as many copies; checks first that their tests pass without."""
    with tempfile.TemporaryDirectory(prefix="conch-faults-") as directory:
        copies: SimpleQueue[Copy] = SimpleQueue()
        for number in range(jobs):
            copies.put(Copy(Path(directory).resolve() / str(number)))

        def failures(arguments: Sequence[str]) -> list[str]:
            copy = copies.get()
            try:
                return copy.sound(arguments)
            finally:
                copies.put(copy)

        def find(fault: Fault) -> Finding:
            copy = copies.get()
            try:
                began = time.monotonic()
                finding = copy.find(fault, whole)
            finally:
                copies.put(copy)
            seconds = time.monotonic() - began
            print(f"{finding.found_by:8} {seconds:5.1f} s  {fault.name}: {finding.test}", flush=True)
            return finding

        with ThreadPoolExecutor(jobs) as threads:
            hints = sorted({test for fault in faults for test in fault.tests})
            runs = [[*QUICK, *hints[number::jobs]] for number in range(min(jobs, len(hints)))]
            failing = [test for tests in threads.map(failures, runs) for test in tests]
            findings = [] if failing else list(threads.map(find, faults))
            slow = {each.test for each in findings if each.found_by == "test-all"} - {_WITHOUT_TEST}
            failing += failures(sorted(slow)) if slow else []
        if failing:
            raise FaultError(f"without any fault these fail: {', '.join(failing)}")
        return findings


def table(findings: Sequence[Finding]) -> str:
    """The findings as text for the documentation."""
    quick = sum(each.found_by == "test" for each in findings)
    lines = [
        f"{len(findings)} faults: `make test` finds {quick}, `make test-all` "
        f"{sum(each.found_by != 'nothing' for each in findings)}.",
        "",
        "| Area | Fault | Where | Found by | Test |",
        "|---|---|---|---|---|",
    ]
    for each in findings:
        fault = each.fault
        test = each.test.rpartition("/")[2].replace("|", "\\|")
        where = fault.file.removeprefix("services/").removeprefix("control/")
        shown = f"`{test}`" if test else ""
        lines.append(f"| {fault.area} | {fault.name} | `{where}` | {each.found_by} | {shown} |")
    return "\n".join(lines)


def write_table(findings: Sequence[Finding]) -> None:
    """Replaces the table in the documentation."""
    path = ROOT / TABLE
    before, _, rest = path.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    path.write_text(f"{before}{BEGIN}\n\n{table(findings)}\n\n{END}{after}")


def main() -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="Plants faults and says which tests find them.")
    parser.add_argument("--only", metavar="NAME", action="append", help="this fault, by name or area")
    parser.add_argument("--whole", action="store_true", help="run the whole sets if the hints find nothing")
    parser.add_argument("--check", action="store_true", help="only check that all faults can be planted")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="faults at a time (default 2)")
    options = parser.parse_args()
    try:
        faults = load(ROOT)
        if found := mistakes(ROOT, faults):
            raise FaultError("\n".join(found))
        if options.only:
            faults = [each for each in faults if {each.name, each.area} & {*options.only}]
        if options.check or not faults:
            print(f"{len(faults)} faults can be planted")
            return 0 if faults else 1
        findings = find_all(faults, options.jobs, options.whole)
    except FaultError as error:
        print(error, file=sys.stderr)
        return 1
    lost = [each.fault.name for each in findings if each.found_by == "nothing"]
    quick = sum(each.found_by == "test" for each in findings)
    print(f"{len(findings)} faults, {quick} found by test, {len(lost)} by nothing: {', '.join(lost)}")
    if options.only:
        return 1 if lost else 0
    write_table(findings)
    return 1 if lost or quick < LEAST_QUICK or len(findings) < LEAST_FAULTS else 0


if __name__ == "__main__":
    sys.exit(main())
