"""Holds the structure of the code: ``python scripts/check_structure.py``; each message says what to do.

Rules: imports follow ``scripts/structure.toml`` and have no cycles; a basename occurs once in a package; no
module sleeps or takes durations from the wall clock; tests use no private name of other modules, also not
in models and programs that they write, and import nothing of another package's tests; docstrings, comments
and error texts do without the words that ``structure.toml`` bans, and docstrings without what tools answer.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import textwrap
import tokenize
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("services", "control")
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

    @property
    def basename(self) -> str:
        """The name of its file."""
        return self.where.rpartition("/")[2]


class Checkout:
    """Sources to check: settings, modules by name without generated ones, and the tests' files."""

    def __init__(self, root: Path) -> None:
        self.settings: dict[str, Any] = tomllib.loads((root / SETTINGS).read_text())
        self.modules: dict[str, Module] = {}
        for folder in SOURCES:
            source = root / folder
            for path in sorted([*source.glob("*conch*/**/*.py"), *source.glob("*.py")]):
                if "_pb2" not in path.name:
                    parts = path.relative_to(source).with_suffix("").parts
                    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
                    self.modules[name] = Module(name, str(path.relative_to(root)), path.read_text())
        self.tests = {
            str(path.relative_to(root)): path.read_text() for path in sorted((root / "tests").rglob("*.py"))
        }


@dataclass(frozen=True)
class Import:
    """One imported name: where, and whether only inside a function or for type checkers."""

    name: str
    line: int
    lazy: bool
    typing: bool


def imports(module: Module) -> Iterator[Import]:
    """All imports of a module; those for type checkers are marked."""
    lazy, typing = set(), set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            lazy |= {id(inner) for inner in ast.walk(node)}
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            typing |= {id(inner) for inner in ast.walk(node)}
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{_source(module, node)}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            yield Import(name, node.lineno, id(node) in lazy, id(node) in typing)


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
        for one in imports(module):
            whole = next(
                (each for each in checkout.settings["packages"]["whole"] if under(one.name, each)), ""
            )
            if whole and not under(module.name, whole) and one.name in checkout.modules and one.name != whole:
                yield f"{module.where}:{one.line}: import {whole} as a whole, not its module {one.name}"
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
        for one in imports(module):
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
        names = {"time": "time"}
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Import):
                names |= {alias.asname: alias.name for alias in node.names if alias.asname}
            elif isinstance(node, ast.ImportFrom) and node.module == "time":
                names |= {alias.asname or alias.name: f"time.{alias.name}" for alias in node.names}
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Call):
                first, _, rest = ast.unparse(node.func).partition(".")
                called = ".".join(filter(None, (names.get(first, first), rest)))
                if called in ("time.time", "time.sleep"):
                    yield (
                        f"{module.where}:{node.lineno}: {called}: take durations from `monotonic_ns`, and "
                        f"wait for an event instead of sleeping"
                    )


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Strings that stand alone, of which most are docstrings, with the line that each begins in."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            constant = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(constant, ast.Constant) and isinstance(constant.value, str):
                yield statement.lineno, constant.value


def prose(module: Module) -> Iterator[tuple[int, str]]:
    """Comments, docstrings and error texts with their lines."""
    for token in tokenize.generate_tokens(io.StringIO(module.text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for first, text in docstrings(module.tree):
        for offset, line in enumerate(text.splitlines()):
            yield first + offset, line
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Raise):
            for part in ast.walk(node):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.lineno, part.value


def check_words(checkout: Checkout) -> Iterator[str]:
    """Banned words in docstrings, comments and error texts."""
    words = checkout.settings["words"]["banned"]
    pattern = re.compile(rf"\b({'|'.join(words)})\b", re.IGNORECASE)
    for module in checkout.modules.values():
        for line, text in prose(module):
            if match := pattern.search(text):
                yield (
                    f"{module.where}:{line}: '{match[0]}': make a part of the system the subject "
                    f"(see CONTRIBUTING.md, Voice)"
                )


def check_docstrings(checkout: Checkout) -> Iterator[str]:
    """Docstrings that list what uses the code, or say that it does nothing."""
    for module in checkout.modules.values():
        for first, text in docstrings(module.tree):
            if match := re.search(r"\bUsed\s+by\b|\A\s*Does\s+nothing\b", text):
                line = first + text.count("\n", 0, match.start())
                yield f"{module.where}:{line}: '{' '.join(match[0].split())}': leave it out; the code says it"


def programs(tree: ast.Module) -> Iterator[tuple[ast.expr, ast.Module, int]]:
    """Strings with a private name in them that are Python, such as models, and the lines put before each."""
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
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
            yield node, program, before.count("\n")
            break


def is_private(name: str) -> bool:
    """True if a name begins with one underscore."""
    return re.match(r"_(?!_)", name) is not None


def own_names(tree: ast.Module) -> set[str]:
    """Private attributes of classes that a file defines, and those that named tuples have for all."""
    own = {"_replace", "_asdict", "_fields", "_make"}
    for node in ast.walk(tree):
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


def privates(tree: ast.Module, own: set[str]) -> Iterator[tuple[int, str]]:
    """Private names of other modules: read, assigned, imported, or named in a string for `setattr`."""
    for node in ast.walk(tree):
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
    for where, text in checkout.tests.items():
        tree = ast.parse(text)
        own = own_names(tree)
        found = set(privates(tree, own))
        for string, program, before in programs(tree):
            last = string.end_lineno or string.lineno
            for line, name in privates(program, own | own_names(program)):
                found.add((min(string.lineno + line - 1 - before, last), name))
        for line, name in sorted(found):
            if not any(under(name, each) for each in allowed):
                yield f"{where}:{line}: {name} is private: test by behaviour, or give the class a public way"


def check_test_folders(checkout: Checkout) -> Iterator[str]:
    """Imports of tests from another package's tests, and of tests from what tests share."""
    for where, text in checkout.tests.items():
        own = where.split("/")[1]
        for one in imports(Module(where, where, text)):
            tests, _, name = one.name.partition(".")
            folder = name.partition(".")[0]
            if tests == "tests" and folder not in (own, "support"):
                yield f"{where}:{one.line}: {one.name} is of other tests: move it to tests/support"


CHECKS = (
    check_directions,
    check_cycles,
    check_basenames,
    check_clocks,
    check_words,
    check_docstrings,
    check_privates,
    check_test_folders,
)


def main() -> None:
    """Prints all that is wrong; ends with 1 if there is anything."""
    checkout = Checkout(ROOT)
    problems = [problem for check in CHECKS for problem in check(checkout)]
    for problem in problems:
        print(problem)
    if problems:
        sys.exit(f"{len(problems)} problems with the structure")


if __name__ == "__main__":
    main()
