"""Each check of the structure finds what it is for, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
from scripts import check_structure as structure

HIDDEN = "_" + "core"
"""Put together, so that what is planted here is no private name of this file."""

SETTINGS = f"""
[words]
banned = ["whoever", "hands? over"]
first = ["What", "Of"]
[tests]
privates = ["os._exit", "torch.{HIDDEN}"]
[sources]
privates = ["os._exit"]
[budgets]
[[imports]]
module = "conch.core"
allowed = ["conch.core", "conch.fast", "numpy"]
[[imports]]
module = "conch"
allowed = ["conch"]
lazy = ["torch"]
"""
PROJECT = """
[tool.hatch.build.targets.wheel.hooks.custom]
modules = ["conch.fast"]
"""
FAST = "services/conch/fast/loop.py"
FROM_FAST = "from conch.fast.loop import A\nclass B(A):\n    n = 1\n"
MARKED = "#\n@mypyc_attr(allow_interpreted_subclasses=True)\n"
TEST = "def test_a(): ...\n"
MARK = "@pytest.mark.process\n"
CLEAN = {
    "services/conch/core/request.py": (
        '"""Requests.\n\n    Whatever: a.\nOffers: What is open.\n"""\nimport numpy\nhands.over("whoever")\n'
    ),
    "services/conch/server.py": "#\nfrom conch.core import request\ndef f():\n    import torch\n",
    "services/conch/other.py": f"#\ndef f(a):\n    a.{HIDDEN}\n",
    "services/conch/wire/__init__.py": "#\nfrom conch.wire.part import A\n",
    "services/conch/wire/part.py": f"#\nclass A:\n    def {HIDDEN}(self):\n        os._exit(1)\n",
    FAST: (
        "#\nclass A(B):\n    __slots__ = ()\n    a: ClassVar = 1\n    b: int\n"
        "class C(IntEnum):\n    D = 1\n"
        "@mypyc_attr(native_class=False)\nclass E(list):\n    f = 1\n"
        "class G(Protocol):\n    h: int\n"
        "class I(NamedTuple):\n    j: Any = 1\n"
        "def k():\n    try: f()\n    except E as error:\n        def g():\n"
        "            try: f()\n            except F as error: pass\n    except F as other: pass\n"
        "    try: f()\n    except E as error: pass\n"
    ),
    "services/conch/core/slow.py": "from conch.fast.loop import G\nclass A(G, Protocol):\n    b: int\n",
    "tests/c/test_d.py": "#\nfrom tests.support.b import a\nfrom tests.c.e import f\n",
    "tests/c/test_f.py": (
        "import threading\nimport time\ngo = threading.Event()\ndef test_a():\n"
        "    assert go.wait(120)\n    assert not go.wait(0.1)\n    assert answers.wait(3)\n"
        "    time.sleep(0)\n"
        "    def run():\n        time.sleep(0.1)\n    thread.join(0.01)\n    ', '.join(texts)\n"
        "    with pytest.raises(TimeoutError):\n        future.result(0.2)\n"
        "    try:\n        call.result(1)\n    except TimeoutError:\n        pass\n"
    ),
    "tests/test_it.py": (
        "class A:\n    def f(self):\n        self._own = 1\n\na = A()\na._own\na._own = 2\nos._exit\n"
        f"getattr(a, '_own')\nfrom torch.{HIDDEN} import b\nMODEL = 'a._own = self.{HIDDEN}'\n"
    ),
}


def problems(root: Path, files: dict[str, str]) -> dict[str, list[str]]:
    """Problems that each check finds in a checkout of these files."""
    for name, text in {structure.SETTINGS: SETTINGS, "pyproject.toml": PROJECT, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    checkout = structure.Checkout(root)
    found = {check.__name__: list(check(checkout)) for check in structure.CHECKS}
    return {name: texts for name, texts in found.items() if texts}


def test_nothing_is_wrong(tmp_path: Path) -> None:
    assert problems(tmp_path, CLEAN) == {}


@pytest.mark.parametrize(
    ("check", "name", "text", "says"),
    [
        ("check_directions", "services/conch/core/a.py", "#\nimport conch.wire\n", "imports conch.wire"),
        ("check_directions", "services/conch/a.py", "#\nimport conch_console\n", "imports conch_console"),
        ("check_directions", "services/conch/a.py", "#\nimport torch\n", "imports torch"),
        ("check_directions", "services/other.py", "#\nimport os\n", "no rule for other"),
        (
            "check_directions",
            "services/conch/core/a.py",
            "#\nfrom ..frontends import b\n",
            "imports conch.frontends.b",
        ),
        ("check_clocks", "services/conch/a.py", "from time import time as t\nt()\n", "a.py:2: time.time"),
        ("check_clocks", "services/conch/a.py", "import time as t\nt.sleep(1)\n", "a.py:2: time.sleep"),
        ("check_cycles", "services/conch/core/a.py", "#\nimport conch.core.a.b\n", ""),
        (
            "check_cycles",
            "services/conch/wire/part.py",
            "#\nfrom conch import server\n",
            "import cycle of the packages conch.core, conch.server, conch.wire",
        ),
        ("check_basenames", "services/conch/wire/server.py", "#\n#\n", "server.py occurs 2 times"),
        ("check_words", "services/conch/a.py", '#\n"""Tells\nwhoever asks."""\n', "a.py:3: 'whoever'"),
        ("check_words", "tests/c/a.py", "#\n# Whoever asks.\n", "a.py:2: 'Whoever'"),
        ("check_words", "services/conch/a.py", "#\nraise E(f'{x}: whoever asks')\n", "a.py:2: 'whoever'"),
        *(
            ("check_words", "services/conch/a.py", f"#\n{text}\n", f"a.py:2: {found!r}")
            for text, found in (
                ("log.info('%s: it hands over', a)", "hands over"),
                ("self._log.exception(f'{a} hand over')", "hand over"),
                ("respond(ConchError('whoever asks'))", "whoever"),
            )
        ),
        ("check_docstrings", "services/conch/a.py", '"""A.\n\nUsed by: `b`."""\n', "a.py:3: 'Used by'"),
        ("check_docstrings", "services/conch/a.py", '#\n"""A. Used\nby b."""\n', "a.py:2: 'Used by'"),
        ("check_docstrings", "services/conch/a.py", '"""Does nothing: b."""\n', "a.py:1: 'Does nothing'"),
        *(
            ("check_docstrings", name, text, f"{name}:{line}: '{found}': begin with")
            for name, text, line, found in (
                ("services/conch/a.py", '"""What it is."""\n', 1, "What"),
                ("tests/c/a.py", '#\n"""\n    Of a request."""\n', 2, "Of"),
                ("bench/a.py", '"""A.\n\n    Args:\n        b: What it is.\n    """\n', 4, "b: What"),
                ("scripts/a/b.py", 'def f():\n    """What it is."""\n', 2, "What"),
            )
        ),
        *(
            ("check_foreign_privates", "services/conch/a.py", f"#\n{text}\n", f"a.py:2: {name} is private")
            for text, name in (
                (f"logging.{HIDDEN}s()", f"logging.{HIDDEN}s"),
                (f"parser.{HIDDEN}s[0]", f"parser.{HIDDEN}s"),
                (f"from asyncio import {HIDDEN}s", f"asyncio.{HIDDEN}s"),
                (f"getattr(thread, '{HIDDEN}s')", f"thread.{HIDDEN}s"),
            )
        ),
        *(
            ("check_compiled_classes", FAST, text, f"loop.py:{line}: {says}")
            for text, line, says in (
                ("#\nclass A:\n    b = 1\n", 3, "compiled, b is lost"),
                ("#\nclass A(B):\n    b: int = 1\n", 3, "compiled, b is lost"),
                ("#\nclass A:\n    __hash__ = B\n", 3, "compiled, __hash__ is lost"),
                ("#\nclass A(NamedTuple):\n    b: object\n", 3, "a compiled NamedTuple has no field of type"),
                ("from conch.wire.part import A\nclass B(A): ...\n", 2, "B is compiled, A is not: mark it"),
            )
        ),
        (
            "check_compiled_functions",
            FAST,
            "#\ndef f(a): return a.__slots__\n",
            "loop.py:2: compiled classes",
        ),
        (
            "check_compiled_functions",
            FAST,
            "#\ndef f(a, b): return a - b.keys()\n",
            "loop.py:2: no frozenset",
        ),
        (
            "check_compiled_functions",
            FAST,
            "#\ndef f():\n    try: g()\n    except A as e: ...\n    except (A, B) as e: ...\n",
            "loop.py:5: 'e' is the name of A before",
        ),
        (
            "check_test_folders",
            "tests/a/b.py",
            "#\nfrom tests.c.test_d import e\n",
            "b.py:2: tests.c.test_d.e",
        ),
        ("check_test_folders", "tests/support/b.py", "#\nimport tests.c.d\n", "b.py:2: tests.c.d is of"),
        *(
            (
                "check_waits",
                "tests/test_b.py",
                f"def test_a():\n    {text}\n",
                f"test_b.py:2: {text}: wait for",
            )
            for text in (
                "time.sleep(0.01)",
                "thread.join(10)",
                "queue.get(timeout=1)",
                "future.result(0.5)",
                "stub(b'', timeout=5)",
                "client.infer('m', client_timeout=20)",
                "asyncio.wait_for(work(), 1)",
            )
        ),
        *(
            ("check_waits", "tests/test_b.py", f"go = threading.Event()\nassert {text}\n", f"b.py:2: {text}")
            for text in ("go.wait(2)", "self.go.wait(0.5)", "semaphore.acquire(timeout=1)")
        ),
        *(
            ("check_privates", "tests/test_b.py", f"#\n{text}\n", f"test_b.py:2: {name} is private")
            for text, name in (
                (f"server.{HIDDEN}.model", f"server.{HIDDEN}"),
                (f"server.{HIDDEN} = 1", f"server.{HIDDEN}"),
                (f"server.{HIDDEN}: int = 1", f"server.{HIDDEN}"),
                (f"def {HIDDEN}(): server.{HIDDEN}", f"server.{HIDDEN}"),
                (f"from conch.server import {HIDDEN} as core", f"conch.server.{HIDDEN}"),
                (f"getattr(server, '{HIDDEN}', None)", f"server.{HIDDEN}"),
                (f"monkeypatch.setattr(conch.server, '{HIDDEN}', 1)", f"conch.server.{HIDDEN}"),
                (f"monkeypatch.setattr('conch.server.{HIDDEN}', 1)", f"conch.server.{HIDDEN}"),
                (f"M = 'class M:\\n    def f(self, a):\\n        a.{HIDDEN} = 1'", f"a.{HIDDEN}"),
                (f"M = f'    def execute(self, requests):\\n        {{x}}.{HIDDEN}()'", f"inserted.{HIDDEN}"),
                (f"M = 'yield request.{HIDDEN}'", f"request.{HIDDEN}"),
            )
        ),
    ],
)
def test_a_planted_violation_is_found(tmp_path: Path, check: str, name: str, text: str, says: str) -> None:
    files = {**CLEAN, name: text}
    if check == "check_cycles":
        files = {**CLEAN, "services/conch/core/a.py": "#\nimport conch.core.b\n"}
        files["services/conch/core/b.py"] = "#\ndef f():\n    from conch.core import a\n"
        says = "import cycle of conch.core.a, conch.core.b"
    found = problems(tmp_path, files)
    assert list(found) == [check]
    (one,) = found[check]
    assert says in one


@pytest.mark.parametrize(
    ("base", "derived", "says"),
    [
        ("#\nclass A: ...\n", FROM_FAST, "a.py:2: B: A is compiled: mark it"),
        (f"{MARKED}class A:\n    n: int\n", FROM_FAST, "do not see the default of n"),
        (
            f"{MARKED}class A:\n    def f(self):\n        self.n = 1\n",
            FROM_FAST,
            "do not see the default of n",
        ),
        ("#\nclass A(Protocol): ...\n", FROM_FAST, "no class may derive from A"),
        (f"{MARKED}class A: ...\n", FROM_FAST, ""),
        ("#\nclass A(Protocol): ...\n", FROM_FAST.replace("(A)", "(A, Protocol)"), ""),
    ],
)
def test_what_may_derive_from_a_compiled_class(tmp_path: Path, base: str, derived: str, says: str) -> None:
    files = {**CLEAN, FAST: base, "services/conch/a.py": derived}
    del files["services/conch/core/slow.py"]
    found = problems(tmp_path, files)
    assert (list(found), says in str(found)) == (["check_compiled_classes"] if says else [], True)


@pytest.mark.parametrize(
    ("budget", "name", "text"),
    [
        ("server-lines", "services/conch/a.py", "#\n#\n"),
        ("server-lines", "control/conch_control/a.py", "#\n#\n"),
        ("test-lines", "tests/c/b.py", "#\n#\n"),
        ("tests", "tests/c/test_b.py", f"{TEST}class A:\n    {TEST}"),
        ("process-tests", "tests/c/e2e/test_b.py", f"{TEST}{TEST}"),
        ("process-tests", "tests/c/test_b.py", f"{MARK}{TEST}{MARK}{TEST}{TEST}"),
        ("process-tests", "tests/c/test_b.py", f"pytestmark = [pytest.mark.process]\n{TEST}{TEST}"),
    ],
)
def test_what_is_over_its_budget_is_found(tmp_path: Path, budget: str, name: str, text: str) -> None:
    def found(most: int) -> list[str]:
        settings = SETTINGS.replace("[budgets]", f"[budgets]\n{budget} = {most}")
        return problems(tmp_path, {structure.SETTINGS: settings, name: text}).get("check_budgets", [])

    assert found(2) == []
    (one,) = found(1)
    assert f"2 {budget}, budget 1" in one
