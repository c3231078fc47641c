"""Guards of an exported program: conditions on the sizes of its inputs, under which its graph is right.

PyTorch writes them as Python code. They are read as arithmetic on sizes, so that a file can't run other code.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from types import CodeType

from conch.core.errors import InvalidArgumentError

_SIZE = re.compile(r"\bL((?:\[(?:'[^'\]]*'|\d+)\])+)\.size\(\)\[(\d+)\]")
_VARIABLE = re.compile(r"L\d+_\d+")
_SIGNS = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod)
_FUNCTIONS = {"max": max, "min": min, "abs": abs}
_LARGEST_EXPONENT = 8
_LONGEST = 10_000


class Guards:
    """The guards of one program.

    Args:
        texts: PyTorch's code of each.
        names: Name of each input.

    Raises:
        InvalidArgumentError: One is not arithmetic on sizes of inputs.
    """

    def __init__(self, texts: Sequence[str], names: Sequence[str]) -> None:
        leaves = {name.lower(): leaf for leaf, name in enumerate(names)}
        self._guards = [(text, _compiled(text, leaves)) for text in texts]

    def failed(self, shapes: Sequence[Sequence[int]]) -> str:
        """The text of the first guard that shapes do not meet; empty if they meet all."""
        if not self._guards:
            return ""
        sizes = {f"L{leaf}_{n}": size for leaf, shape in enumerate(shapes) for n, size in enumerate(shape)}
        for text, code in self._guards:
            try:
                if eval(code, {"__builtins__": _FUNCTIONS}, sizes):
                    continue
            except ArithmeticError:  # a division by 0, a number beyond floats
                pass
            return text
        return ""


def _compiled(text: str, leaves: Mapping[str, int]) -> CodeType:
    def variable(found: re.Match[str]) -> str:
        # PyTorch names the input d['k'][0] d_k_0.
        keys = re.findall(r"[^\[\]']+", found[1])
        name = re.sub(r"\W", "_", "_".join(keys)).lower()
        return f"L{leaves[name]}_{found[2]}"

    try:
        tree = ast.parse(_SIZE.sub(variable, text), mode="eval")
        if len(text) <= _LONGEST and _is_condition(tree.body):
            return compile(tree, "<guard>", "eval")
    except (KeyError, SyntaxError, ValueError, RecursionError, MemoryError):
        pass
    raise InvalidArgumentError(
        f"a guard of the exported program can't be checked: {text[:200]!r}; export the model again so that "
        f"its shapes alone decide"
    )


def _is_condition(node: ast.expr) -> bool:
    match node:
        case ast.BoolOp(values=values):
            return all(map(_is_condition, values))
        case ast.Compare(left=left, comparators=others):
            return all(map(_is_condition, (left, *others)))
        case ast.BinOp(left=left, op=ast.Pow(), right=ast.Constant(value=int(exponent))):
            nested = any(isinstance(each, ast.Pow) for each in ast.walk(left))  # powers of powers grow fast
            return not nested and 0 <= exponent <= _LARGEST_EXPONENT and _is_condition(left)
        case ast.BinOp(left=left, op=sign, right=right):
            return isinstance(sign, _SIGNS) and _is_condition(left) and _is_condition(right)
        case ast.UnaryOp(operand=operand):
            return _is_condition(operand)
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]):
            return name in _FUNCTIONS and all(map(_is_condition, arguments))
        case ast.IfExp(test=test, body=body, orelse=other):
            return all(map(_is_condition, (test, body, other)))
        case ast.Name(id=name):
            return _VARIABLE.fullmatch(name) is not None
        case ast.Constant(value=value):
            return isinstance(value, (bool, int, float))
    return False
