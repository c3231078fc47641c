"""Holds the structure of the code: ``python scripts/check_structure.py``; each message says what to do.

Rules: imports follow ``scripts/structure.toml`` and have no cycles; a basename occurs once in a package; no
module sleeps or takes durations from the wall clock; no module uses a private name of Python or of a package
that is not listed; tests use no private name of other modules, also not in models and programs that they
write, import nothing of another package's tests, do not sleep, and fail at no limit that a busy machine
exceeds; docstrings, comments, error and log texts do without the words that ``structure.toml`` bans, and
docstrings without what tools answer and the first words named there; lines and tests stay in the budgets;
what mypyc compiles (``pyproject.toml`` lists it) does without what would do something else then, and without
a sign.
"""

from __future__ import annotations

import ast
import gc
import io
import re
import sys
import textwrap
import tokenize
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("services", "control")
OTHERS = ("bench", "scripts", "examples", "deploy")
SETTINGS = "scripts/structure.toml"


@dataclass(frozen=True)
class Module:
    """A source file, and its path from the root of the checkout."""

    name: str
    where: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """Syntax tree of the module."""
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes of its tree: walking one costs more than parsing it."""
        return list(ast.walk(self.tree))

    @cached_property
    def statements(self) -> list[Statement]:
        """All statements."""
        return list(_statements(self.tree.body))

    @cached_property
    def imports(self) -> list[Import]:
        """All imports; those for type checkers are marked."""
        found = []
        for node, lazy, typing in self.statements:
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{_source(self, node)}.{alias.name}" for alias in node.names]
            else:
                continue
            found += [Import(name, node.lineno, lazy, typing) for name in names]
        return found

    @property
    def basename(self) -> str:
        """The name of its file."""
        return self.where.rpartition("/")[2]


class Checkout:
    """Sources to check: settings, modules by name without generated ones, tests, and the other files."""

    def __init__(self, root: Path) -> None:
        self.settings: dict[str, Any] = tomllib.loads((root / SETTINGS).read_text())
        project = root / "pyproject.toml"
        build = tomllib.loads(project.read_text())["tool"]["hatch"]["build"] if project.is_file() else {}
        hooks = build.get("targets", {}).get("wheel", {}).get("hooks", {})
        self.compiled: list[str] = hooks.get("custom", {}).get("modules", [])
        self.modules: dict[str, Module] = {}
        for folder in SOURCES:
            source = root / folder
            for path in sorted([*source.glob("*conch*/**/*.py"), *source.glob("*.py")]):
                if "_pb2" not in path.name:
                    parts = path.relative_to(source).with_suffix("").parts
                    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
                    self.modules[name] = Module(name, str(path.relative_to(root)), path.read_text())
        self.tests, self.others = (
            [
                Module("", str(path.relative_to(root)), path.read_text())
                for folder in folders
                for path in sorted((root / folder).rglob("*.py"))
            ]
            for folders in (["tests"], OTHERS)
        )


@dataclass(frozen=True)
class Import:
    """One imported name: where, and whether only inside a function or for type checkers."""

    name: str
    line: int
    lazy: bool
    typing: bool


class Statement(NamedTuple):
    """A statement, and whether it is inside a function or for type checkers only."""

    node: ast.stmt
    lazy: bool
    typing: bool


def _statements(body: list[ast.stmt], lazy: bool = False, typing: bool = False) -> Iterator[Statement]:
    for node in body:
        yield Statement(node, lazy, typing)
        inside = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        checked = typing or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
        for part in ("body", "orelse", "finalbody"):
            yield from _statements(getattr(node, part, []), inside, checked)
        for part in ("handlers", "cases"):
            for each in getattr(node, part, []):
                yield from _statements(each.body, inside, checked)


def _source(module: Module, node: ast.ImportFrom) -> str:
    """The module or package that names are imported from."""
    if not node.level:
        return node.module or ""
    up = node.level - (module.basename == "__init__.py")
    parts = module.name.split(".")
    return ".".join([*parts[: len(parts) - up], *([node.module] if node.module else [])])


def under(name: str, package: str) -> bool:
    """True if a module is a package or lies in it."""
    return name == package or name.startswith(f"{package}.")


def check_directions(checkout: Checkout) -> Iterator[str]:
    """Imports that the first rule for their module does not allow."""
    for module in checkout.modules.values():
        rule = next(
            (each for each in checkout.settings["imports"] if under(module.name, each["module"])), None
        )
        if rule is None:
            yield f"{module.where}: no rule for {module.name}; add one to {SETTINGS}"
            continue
        for one in module.imports:
            if one.typing or one.name.partition(".")[0] in sys.stdlib_module_names:
                continue
            allowed = [*rule["allowed"], *(rule.get("lazy", []) if one.lazy else [])]
            if not any(under(one.name, package) for package in allowed):
                yield (
                    f"{module.where}:{one.line}: {module.name} imports {one.name}, which its rule does not "
                    f"allow: hand the object in, or move the code to where both may be known"
                )


def graph(found: dict[str, Module]) -> dict[str, set[str]]:
    """Dependencies of each module, packages included, of lazy and type-checking imports too."""
    edges: dict[str, set[str]] = defaultdict(set)
    for module in found.values():
        for one in module.imports:
            name = one.name
            while name:
                if name in found and not under(module.name, name):
                    edges[module.name].add(name)
                name = name.rpartition(".")[0]
    return edges


def cycles(edges: dict[str, set[str]]) -> Iterator[list[str]]:
    """Groups of nodes that reach each other (Tarjan's algorithm)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in edges.get(name, ()):
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            cycle = []
            while True:
                cycle.append(stack.pop())
                if cycle[-1] == name:
                    break
            if len(cycle) > 1:
                found.append(sorted(cycle))

    sys.setrecursionlimit(10_000)
    for name in edges:
        if name not in index:
            visit(name)
    yield from found


def check_cycles(checkout: Checkout) -> Iterator[str]:
    """Modules, and packages, that import each other, directly or by way of others.

    A package is a folder directly in an import package, such as ``conch.core`` or ``conch_engines.trees``;
    an import package's own modules are one each.
    """
    modules = graph(checkout.modules)
    for cycle in cycles(modules):
        yield f"import cycle of {', '.join(cycle)}: move what they share into a module that both import"
    packages: dict[str, set[str]] = defaultdict(set)
    reasons: dict[tuple[str, str], str] = {}
    for name, others in modules.items():
        for other in others:
            one, two = (".".join(each.split(".")[:2]) for each in (name, other))
            if one != two and not under(one, two):
                packages[one].add(two)
                reasons.setdefault((one, two), f"{name} -> {other}")
    for cycle in cycles(packages):
        edges = [reasons[one, two] for one in cycle for two in cycle if (one, two) in reasons]
        yield f"import cycle of the packages {', '.join(cycle)}: {'; '.join(edges)}"


def check_basenames(checkout: Checkout) -> Iterator[str]:
    """Files of one name in a package."""
    names: dict[tuple[str, str], list[str]] = defaultdict(list)
    for module in checkout.modules.values():
        if module.basename != "__init__.py":
            names[module.name.partition(".")[0], module.basename].append(module.where)
    for (_, name), places in sorted(names.items()):
        if len(places) > 1:
            yield f"{name} occurs {len(places)} times ({', '.join(places)}): name each after its content"


def check_clocks(checkout: Checkout) -> Iterator[str]:
    """Calls of the wall clock and of sleep, under whatever name they were imported."""
    for module in checkout.modules.values():
        names: dict[str, str] = {}
        for node, *_ in module.statements:
            if isinstance(node, ast.Import):
                names |= {alias.asname or alias.name: alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module == "time":
                names |= {alias.asname or alias.name: f"time.{alias.name}" for alias in node.names}
        if not any(under(name, "time") for name in names.values()):
            continue
        for each in module.nodes:
            if isinstance(each, ast.Call):
                first, _, rest = ast.unparse(each.func).partition(".")
                called = ".".join(filter(None, (names.get(first, first), rest)))
                if called in ("time.time", "time.sleep"):
                    yield (
                        f"{module.where}:{each.lineno}: {called}: take durations from `monotonic_ns`, and "
                        f"wait for an event instead of sleeping"
                    )


def docstrings(module: Module) -> Iterator[tuple[int, str]]:
    """Strings that stand alone, of which most are docstrings, with the line that each begins in."""
    for statement, *_ in module.statements:
        constant = statement.value if isinstance(statement, ast.Expr) else None
        if isinstance(constant, ast.Constant) and isinstance(constant.value, str):
            yield statement.lineno, constant.value


LOGGING = {"debug", "info", "warning", "error", "exception", "critical", "log"}
"""Methods of loggers."""


def is_message(node: ast.AST) -> bool:
    """True for a call that logs or that makes an error."""
    called = node.func if isinstance(node, ast.Call) else None
    name = getattr(called, "attr", getattr(called, "id", ""))
    return name in LOGGING or name.endswith("Error")


def prose(module: Module) -> Iterator[tuple[int, str]]:
    """Docstrings, and texts of errors and logs, with their lines."""
    for first, text in docstrings(module):
        for offset, line in enumerate(text.splitlines()):
            yield first + offset, line
    yield from sorted(
        {
            (part.lineno, part.value)
            for node in module.nodes
            if isinstance(node, ast.Raise) or is_message(node)
            for part in ast.walk(node)
            if isinstance(part, ast.Constant) and isinstance(part.value, str)
        }
    )


def comments(module: Module, pattern: re.Pattern[str]) -> Iterator[tuple[int, str]]:
    """Comments that may match, with their lines: tokens are taken apart only where a line does."""
    if any("#" in line and pattern.search(line) for line in module.text.splitlines()):
        for token in tokenize.generate_tokens(io.StringIO(module.text).readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string


def check_words(checkout: Checkout) -> Iterator[str]:
    """Banned words in docstrings, comments, and texts of errors and logs."""
    words = checkout.settings["words"]["banned"]
    pattern = re.compile(rf"\b({'|'.join(words)})\b", re.IGNORECASE)
    for module in (*checkout.modules.values(), *checkout.tests, *checkout.others):
        for line, text in [*comments(module, pattern), *prose(module)]:
            if match := pattern.search(text):
                yield (
                    f"{module.where}:{line}: '{match[0]}': make a part of the system the subject "
                    f"(see CONTRIBUTING.md, Voice)"
                )


def check_docstrings(checkout: Checkout) -> Iterator[str]:
    """Docstrings that say what the code says; docstrings and their entries that begin with a banned word."""
    redundant = re.compile(r"\bUsed\s+by\b|\A\s*Does\s+nothing\b")
    words = "|".join(checkout.settings["words"]["first"])
    opening = re.compile(rf"(?:\A\s*|^ +\w+: )({words})\b", re.MULTILINE)
    for module in (*checkout.modules.values(), *checkout.tests, *checkout.others):
        for first, text in docstrings(module):
            for pattern, advice in (
                (redundant, "leave it out; the code says it"),
                (opening, "begin with the noun or the verb (see CONTRIBUTING.md, Voice)"),
            ):
                for match in pattern.finditer(text):
                    line = first + text.count("\n", 0, match.start())
                    yield f"{module.where}:{line}: '{' '.join(match[0].split())}': {advice}"


def programs(nodes: list[ast.AST]) -> Iterator[tuple[ast.expr, list[ast.AST], int]]:
    """Strings with a private name in them that are Python, such as models, and the lines put before each."""
    inside = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else "inserted" for part in node.values)
            text = "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            text = node.value
        else:
            continue
        if not re.search(r"\b_[a-z]", text):
            continue
        # Part of a function, or what follows the first line of one.
        for before in ("", "def inserted():\n", "def inserted():\n    inserted\n"):
            try:
                program = ast.parse(before + text if before else textwrap.dedent(text))
            except (SyntaxError, ValueError):
                continue
            yield node, list(ast.walk(program)), before.count("\n")
            break


def is_private(name: str) -> bool:
    """True if a name begins with one underscore."""
    return re.match(r"_(?!_)", name) is not None


def own_names(nodes: list[ast.AST]) -> set[str]:
    """Private attributes of classes that a file defines, and those that named tuples have for all."""
    own = {"_replace", "_asdict", "_fields", "_make"}
    for node in nodes:
        if isinstance(node, ast.ClassDef):
            for statement in node.body:
                if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    own.add(statement.name)
                elif isinstance(statement, ast.AnnAssign | ast.Assign):
                    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                    own |= {target.id for target in targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and of_itself(node):
            own.add(node.attr)
    return own


def of_itself(node: ast.Attribute) -> bool:
    """True if an attribute is that of the object whose method this is."""
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def privates(nodes: list[ast.AST], own: set[str]) -> Iterator[tuple[int, str]]:
    """Private names of other modules: read, assigned, imported, or named in a string for `setattr`."""
    for node in nodes:
        if isinstance(node, ast.Attribute):
            if is_private(node.attr) and node.attr not in own and not of_itself(node):
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                if any(map(is_private, name.split("."))):
                    yield node.lineno, name
        elif isinstance(node, ast.Call) and len(node.args) > 1:
            called = node.func.attr if isinstance(node.func, ast.Attribute) else ast.unparse(node.func)
            of, given = ast.unparse(node.args[0]), node.args[1]
            if (
                called in ("getattr", "setattr", "hasattr", "delattr", "object")
                and isinstance(given, ast.Constant)
                and isinstance(given.value, str)
                and is_private(given.value)
                and given.value not in own
                and of not in ("self", "cls")
            ):
                yield node.lineno, f"{of}.{given.value}"


def check_privates(checkout: Checkout) -> Iterator[str]:
    """Tests, and programs in their strings, that use a private name of another module."""
    allowed = set(checkout.settings["tests"]["privates"])
    for module in checkout.tests:
        own = own_names(module.nodes)
        found = set(privates(module.nodes, own))
        for string, program, before in programs(module.nodes):
            last = string.end_lineno or string.lineno
            for line, name in privates(program, own | own_names(program)):
                found.add((min(string.lineno + line - 1 - before, last), name))
        for line, name in sorted(found):
            if not any(under(name, each) for each in allowed):
                where = f"{module.where}:{line}"
                yield f"{where}: {name} is private: test by behaviour, or give the class a public way"


def check_foreign_privates(checkout: Checkout) -> Iterator[str]:
    """Private names in sources that no source defines: those of Python and of packages."""
    own: set[str] = set()
    for module in checkout.modules.values():
        for node in module.nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                own.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                own.add(node.id)
        own |= own_names(module.nodes)
    allowed = checkout.settings["sources"]["privates"]
    for module in checkout.modules.values():
        for line, name in privates(module.nodes, own):
            if not any(under(name, each) for each in allowed):
                yield (
                    f"{module.where}:{line}: {name} is private: find a public way, or name it in {SETTINGS} "
                    f"and, if it is Python's, in docs/internals/standard-library.md"
                )


def check_test_folders(checkout: Checkout) -> Iterator[str]:
    """Imports of tests from another package's tests, and of tests from what tests share."""
    for module in checkout.tests:
        own = module.where.split("/")[1]
        for one in module.imports:
            tests, _, name = one.name.partition(".")
            folder = name.partition(".")[0]
            if tests == "tests" and folder not in (own, "support"):
                yield f"{module.where}:{one.line}: {one.name} is of other tests: move it to tests/support"


def starts_processes(where: str, marks: Iterable[ast.expr]) -> bool:
    """True for a test that may start processes, by its folder or its marks."""
    folders = ("/e2e/", "/chaos/")
    return any(each in where for each in folders) or any(
        "mark.process" in ast.unparse(each) for each in marks
    )


def check_budgets(checkout: Checkout) -> Iterator[str]:
    """Lines of the server and of tests, and functions that are tests, beyond what the settings allow."""
    found = Counter[str]()
    for module in checkout.modules.values():
        if under(module.name, "conch") or under(module.name, "conch_control"):
            found["server-lines"] += module.text.count("\n")
    for module in checkout.tests:
        found["test-lines"] += module.text.count("\n")
        marks = [
            node.value
            for node in module.tree.body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
        ]
        for node, *_ in module.statements:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                found["tests"] += 1
                found["process-tests"] += starts_processes(module.where, [*marks, *node.decorator_list])
    for name, most in checkout.settings["budgets"].items():
        if found[name] > most:
            yield (
                f"{found[name]} {name}, budget {most}: remove as many elsewhere, or raise the budget in "
                f"{SETTINGS} and say in the commit what it buys"
            )


_SHORT_S, _PATIENT_S = 3, 60
_LIMITED = {"result": 0, "exception": 0, "join": 0, "settimeout": 0, "wait_for": 1}
"""Methods with a time limit, and its place."""
_RAISING = {"result", "exception", "get", "communicate", "run", "wait_for"}
"""Functions that raise when their limit is over."""


def events_of(tree: ast.Module) -> set[str]:
    """Names and attributes that are events somewhere in a file; other objects may have a `wait` of counts."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                pairs = [(target, node.value)]
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    pairs = list(zip(target.elts, node.value.elts, strict=False))
                found |= {
                    last_name(name) for name, value in pairs if ast.unparse(value) == "threading.Event()"
                }
    return found


def last_name(of: ast.expr) -> str:
    """Name behind the last dot."""
    return ast.unparse(of).rpartition(".")[2]


def is_limited(call: ast.Call, events: set[str], least: float) -> bool:
    """True if a call waits for a literal time of over `least` seconds that a busy machine may exceed."""
    given = [word.value for word in call.keywords if word.arg in ("timeout", "client_timeout")]
    if isinstance(call.func, ast.Attribute):
        called = call.func.attr
        waits = called == "wait" and last_name(call.func.value) in events
        place = 0 if waits else _LIMITED.get(called, len(call.args))
        given += call.args[place : place + 1]
    values = [each.value for each in given if isinstance(each, ast.Constant)]
    return any(isinstance(value, int | float) and least < value < _PATIENT_S for value in values)


def bad_waits(
    node: ast.AST, events: set[str], fails: bool = True, sleeps: bool = False
) -> Iterator[ast.Call]:
    """Sleeps of tests, and waits with limits that a busy machine exceeds.

    Args:
        node: Tree in which to look.
        events: Names of events.
        fails: True if a test fails with what is raised here.
        sleeps: True if a test runs this on its own thread.
    """
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        sleeps = getattr(node, "name", "").startswith("test_")
    elif isinstance(node, ast.Try):
        fails = False
    elif isinstance(node, ast.With):
        contexts = [last_name(getattr(each.context_expr, "func", each.context_expr)) for each in node.items]
        fails = fails and not {"raises", "suppress"}.intersection(contexts)
    elif (
        isinstance(node, ast.Assert) and isinstance(node.test, ast.Call) and is_limited(node.test, events, 0)
    ):
        yield node.test
        return
    elif isinstance(node, ast.Call):
        called, first = last_name(node.func), node.args[0] if node.args else None
        least_s = 0 if fails and called in _RAISING else _SHORT_S
        slept = sleeps and called == "sleep" and isinstance(first, ast.Constant) and first.value
        if slept or is_limited(node, events, least_s):
            yield node
    for child in ast.iter_child_nodes(node):
        yield from bad_waits(child, events, fails, sleeps)


def check_waits(checkout: Checkout) -> Iterator[str]:
    """Sleeps of tests, and limits of theirs that a busy machine exceeds."""
    for module in checkout.tests:
        for call in bad_waits(module.tree, events_of(module.tree)):
            yield (
                f"{module.where}:{call.lineno}: {ast.unparse(call)}: wait for a state, up to PATIENCE_S; a "
                f"limit that is to pass is at most {_SHORT_S} s, and not asserted on"
            )


_UNCOMPILED = {"NamedTuple", "TypedDict", "Enum", "IntEnum", "StrEnum", "IntFlag", "Flag"}
"""Bases of classes that mypyc leaves as they are."""


class Class(NamedTuple):
    """A class, the module that defines it, whether mypyc compiles that, and the names of its bases."""

    node: ast.ClassDef
    module: Module
    compiled: bool
    bases: list[str]

    def marked(self, mark: str) -> bool:
        """True with this argument of `mypyc_attr`."""
        return any(mark in ast.unparse(each) for each in self.node.decorator_list)

    @property
    def native(self) -> bool:
        """True if mypyc compiles the class itself."""
        return self.compiled and not _UNCOMPILED & set(self.bases) and not self.marked("native_class=False")

    @property
    def protocol(self) -> bool:
        """True for a Protocol."""
        return "Protocol" in self.bases

    @property
    def defaults(self) -> Iterator[tuple[str, int]]:
        """Names with a value in the class's body that is not marked as the class's, with their lines."""
        for each in self.node.body:
            if isinstance(each, ast.Assign):
                targets = each.targets
            elif isinstance(each, ast.AnnAssign) and each.value is not None:
                targets = [] if "ClassVar" in ast.unparse(each.annotation) else [each.target]
            else:
                continue
            for target in targets:
                if ast.unparse(target) not in ("__slots__", "__deletable__"):
                    yield ast.unparse(target), each.lineno


def classes(checkout: Checkout) -> dict[str, Class]:
    """All classes at the level of modules, by their full names; bases are full names where they are known."""
    found = {}
    for module in checkout.modules.values():
        names = {
            alias.asname or alias.name: f"{_source(module, node)}.{alias.name}"
            for node, *_ in module.statements
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        names |= {
            node.name: f"{module.name}.{node.name}"
            for node in module.tree.body
            if isinstance(node, ast.ClassDef)
        }
        compiled = any(under(module.name, each) for each in checkout.compiled)
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef):
                bases = [ast.unparse(each).partition("[")[0] for each in node.bases]
                bases = [
                    names.get(each, each).removeprefix("typing.").removeprefix("enum.") for each in bases
                ]
                found[f"{module.name}.{node.name}"] = Class(node, module, compiled, bases)
    return found


def attributes(node: ast.ClassDef) -> set[str]:
    """Attributes of a class's objects that it declares, or that its methods set."""
    declared = {
        each.target.id
        for each in node.body
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
        if "ClassVar" not in ast.unparse(each.annotation)
    }
    return declared | {
        each.attr
        for each in ast.walk(node)
        if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store) and of_itself(each)
    }


def check_compiled_classes(checkout: Checkout) -> Iterator[str]:
    """Classes that do something else once mypyc compiles them, or classes that they derive from."""
    found = classes(checkout)
    for one in found.values():
        where = one.module.where
        if one.native and not one.marked("dataclass"):
            for name, line in one.defaults:
                yield f"{where}:{line}: compiled, {name} is lost: set it in `__init__`, or use ClassVar"
        for each in one.node.body if one.compiled and "NamedTuple" in one.bases else ():
            if isinstance(each, ast.AnnAssign) and ast.unparse(each.annotation) == "object":
                yield f"{where}:{each.lineno}: a compiled NamedTuple has no field of type object: use Any"
        for base in [found[base] for base in one.bases if base in found]:
            place, name = f"{where}:{one.node.lineno}: {one.node.name}", base.node.name
            if one.native and not (base.compiled or base.protocol):
                yield f"{place} is compiled, {name} is not: mark it with mypyc_attr(native_class=False)"
            elif not one.compiled and base.native:
                yield from (f"{place}: {text}" for text in derivation_problems(one, base))


def derivation_problems(one: Class, base: Class) -> Iterator[str]:
    """Problems of a class that is not compiled with a base that is."""
    name = base.node.name
    if base.protocol:
        if not one.protocol:
            yield f"no class may derive from {name}, a compiled Protocol: leave the base out"
        return
    if not base.marked("allow_interpreted_subclasses"):
        yield f"{name} is compiled: mark it with mypyc_attr(allow_interpreted_subclasses=True)"
    for default, _ in one.defaults:
        if default in attributes(base.node):
            yield f"compiled methods of {name} do not see the default of {default}: set it in `__init__`"


def check_compiled_functions(checkout: Checkout) -> Iterator[str]:
    """In compiled modules: `__slots__`, sets less keys of dicts, one name for exceptions of two types."""
    for module in checkout.modules.values():
        if not any(under(module.name, each) for each in checkout.compiled):
            continue
        for node in module.nodes:
            if isinstance(node, ast.Attribute) and node.attr == "__slots__":
                yield f"{module.where}:{node.lineno}: compiled classes have no __slots__: name a ClassVar"
            if isinstance(node, ast.BinOp) and ast.unparse(node.right).endswith(".keys()"):
                yield f"{module.where}:{node.lineno}: no frozenset, as mypyc expects: use a method of the set"
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield from (f"{module.where}:{text}" for text in shared_names(node))


def shared_names(function: ast.AST) -> Iterator[str]:
    """Names for exceptions of two types, of which a compiled function takes the second for the first."""
    types: dict[str, str] = {}
    for node in _own_nodes(function):
        if isinstance(node, ast.ExceptHandler) and node.name and node.type is not None:
            caught = ast.unparse(node.type)
            if types.setdefault(node.name, caught) != caught:
                yield f"{node.lineno}: '{node.name}' is the name of {types[node.name]} before: use another"


def _own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function without those of functions in it."""
    for child in ast.iter_child_nodes(function):
        yield child
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from _own_nodes(child)


CHECKS = (
    check_directions,
    check_cycles,
    check_basenames,
    check_clocks,
    check_words,
    check_docstrings,
    check_privates,
    check_foreign_privates,
    check_test_folders,
    check_budgets,
    check_waits,
    check_compiled_classes,
    check_compiled_functions,
)


def main() -> None:
    """Prints all that is wrong; ends with 1 if there is anything."""
    gc.disable()  # all trees are kept to the end; going through them again and again takes half of the time
    checkout = Checkout(ROOT)
    problems = [problem for check in CHECKS for problem in check(checkout)]
    for problem in problems:
        print(problem)
    if problems:
        sys.exit(f"{len(problems)} problems with the structure")


if __name__ == "__main__":
    main()
