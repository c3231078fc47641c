"""Checks the JSON of an exported program, which PyTorch turns into Python code and calls.

PyTorch evaluates symbolic sizes as Python, calls any function below ``torch`` that a node names, imports
modules that a tree of inputs names, and writes names into generated code. So the JSON is copied by an
allow-list: strings are names, except where the key tells what else they are, and those are parsed here.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable
from typing import Any

_NAME = re.compile(r"[\w.+\-/ ]*")
_IDENTIFIER = re.compile(r"\w*")
_SYMBOL = re.compile(r"[a-zA-Z]+\d+|oo|int_oo|zoo|nan|pi|E|I|true|false")
_FAR_SYMBOL = re.compile(r"(u|zuf)\d{7}")
_DIGITS = re.compile(r"[+\-]?(\d{1,400}(\.\d{0,400})?(e[+\-]?\d{1,3})?|inf|nan)")
_LONGEST_EXPRESSION = 10_000
_LARGEST_NUMBER = 1 << 64
_LARGEST_EXPONENT = 64

_OPERATOR = re.compile(r"torch\.ops\.(?!higher_order\.|_)(\w+)\.([a-zA-Z_]\w*)\.([a-zA-Z]\w*)")
_FUNCTION = re.compile(
    r"_operator\.(add|sub|mul|truediv|floordiv|mod|pow|neg|pos|abs|and_|or_|not_|lshift|rshift|"
    r"eq|ne|lt|le|gt|ge|getitem)|math\.(ceil|floor|trunc|sqrt)|"
    r"torch\.sym_(float|int|ite|max|min|not|sqrt|sum)|torch\._sym_(sqrt|log2)|"
    r"torch\._functorch\.predispatch\.(_add_batch_dim|_remove_batch_dim|_vmap_increment_nesting|"
    r"_vmap_decrement_nesting|lazy_load_decompositions)"
)
_HIGHER_ORDER = re.compile(
    r"torch\.ops\.higher_order\.(associative_scan|auto_functionalized|auto_functionalized_v2|cond|"
    r"flex_attention|hints_wrapper|invoke_subgraph|map_impl|out_dtype|scan|strict_mode|"
    r"tag_activation_checkpoint|while_loop|with_effects|wrap|wrap_with_autocast|wrap_with_set_grad_enabled)"
)
_FILE_OPERATORS = frozenset({"save", "from_file"})

_TREES = frozenset(
    {
        *("builtins.tuple", "builtins.list", "builtins.dict"),
        *("collections.OrderedDict", "collections.deque", "collections.namedtuple"),
    }
)

# What PyTorch's printer of symbolic sizes writes, and the functions that its reader knows.
_NAMES = (
    "Symbol Dummy Integer Rational Float Half One Zero NegativeOne Infinity NegativeInfinity IntInfinity "
    "NegativeIntInfinity Add Mul Pow Max Min Abs Mod Piecewise ExprCondPair floor ceiling sqrt log exp Eq Ne "
    "Lt Le Gt Ge Equality Unequality StrictLessThan LessThan StrictGreaterThan GreaterThan And Or Not Xor "
    "BooleanTrue BooleanFalse FloorDiv ModularIndexing Where PythonMod CleanDiv CeilToInt FloorToInt CeilDiv "
    "LShift RShift PowByNatural FloatPow FloatTrueDiv IntTrueDiv IsNonOverlappingAndDenseIndicator "
    "TruncToFloat TruncToInt RoundToInt RoundDecimal ToFloat Identity OpaqueUnaryFn_sqrt OpaqueUnaryFn_log2"
)
_FUNCTIONS = frozenset(_NAMES.split())
_TEXTS = {"Symbol": _IDENTIFIER, "Dummy": _IDENTIFIER, "Float": _DIGITS}
# Functions whose value may have as many digits as their second argument says.
_POWERS = frozenset({"Pow", "LShift", "RShift", "PowByNatural", "FloatPow", "RoundDecimal"})
_POWER_SIGNS = (ast.Pow, ast.LShift, ast.RShift)
_SIGNS = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.BitAnd, ast.BitOr, *_POWER_SIGNS)


class RefusedProgramError(ValueError):
    """A program holds something that could run code; the text says what and where."""


def checked(program: dict[str, Any]) -> dict[str, Any]:
    """A copy of a program's JSON without what is not needed to run it.

    Raises:
        RefusedProgramError: It could run code, or is not what PyTorch writes.
    """
    copied = _copied(program, "")
    assert isinstance(copied, dict), "a dict is copied to a dict"
    return copied


def _copied(value: Any, key: str) -> Any:
    if key in _DROPPED:
        return _DROPPED[key]()
    if isinstance(value, str):
        return _STRINGS.get(key, _name)(value)
    if isinstance(value, list):
        return [_copied(each, key) for each in value]
    if isinstance(value, dict):
        if "as_custom_obj" in value or "custom_obj" in value:
            raise RefusedProgramError("it takes Python or C++ objects")
        named = _range if key == "range_constraints" else _name
        return {named(each): _copied(value[each], each) for each in value}
    return value


def _name(text: str) -> str:
    if not _NAME.fullmatch(text):
        raise RefusedProgramError(f"{text[:100]!r} is no name")
    return text


def _range(text: str) -> str:
    """A size as text, which PyTorch only compares; but it counts to the number of an unbacked symbol."""
    if _FAR_SYMBOL.match(text):
        raise RefusedProgramError(f"'{text[:100]}' is no symbol")
    return text


def _identifier(text: str) -> str:
    """A name that generated code has as a variable or as a keyword."""
    if not _IDENTIFIER.fullmatch(text):
        raise RefusedProgramError(f"{text[:100]!r} is no identifier")
    return text


def _operator(text: str) -> str:
    """The target of a node: an operator, never any other function that PyTorch could look up."""
    found = _OPERATOR.fullmatch(text)
    if found and found[2] in _FILE_OPERATORS:
        raise RefusedProgramError(f"operator '{text}' accesses files of the server")
    if found or _FUNCTION.fullmatch(text) or _HIGHER_ORDER.fullmatch(text):
        return text
    raise RefusedProgramError(f"it calls {text[:100]!r}, which is no operator of tensors")


def _tree(text: str) -> str:
    """A tree of inputs or outputs; loading one of another type imports modules."""
    _, tree = json.loads(text)
    trees = [tree]
    while trees:
        node = trees.pop()
        kind, context = node["type"], node["context"]
        if kind is not None and kind not in _TREES:
            raise RefusedProgramError(f"its inputs or outputs are of type {str(kind)[:100]!r}")
        if kind == "collections.namedtuple":
            _name(context)  # of a registered class
        elif context is not None:
            keys = json.loads(context)
            for key in keys if isinstance(keys, list) else [keys]:
                if not isinstance(key, (str, int, float, type(None))):
                    raise RefusedProgramError("keys of its inputs or outputs are no plain values")
                _name(str(key))
        trees.extend(node["children_spec"])
    return text


def _expression(text: str) -> str:
    """A symbolic size: arithmetic on numbers and symbols that is quick to evaluate."""
    try:
        short = len(text) <= _LONGEST_EXPRESSION
        if short and _is_arithmetic(ast.parse(text, mode="eval").body):
            return text
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        pass
    raise RefusedProgramError(f"{text[:100]!r} is no symbolic size")


def _is_arithmetic(node: ast.expr) -> bool:
    match node:
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=keywords):
            if name not in _FUNCTIONS or (name in _POWERS and not _is_small_power(arguments)):
                return False
            texts = [each for each in arguments if _is_text(each, name)]
            others = [each for each in arguments if each not in texts]
            return all(map(_is_arithmetic, others)) and all(_is_small(each.value) for each in keywords)
        case ast.BinOp(left=left, op=sign, right=right):
            if isinstance(sign, _POWER_SIGNS) and not _is_small_power([left, right]):
                return False
            return isinstance(sign, _SIGNS) and _is_arithmetic(left) and _is_arithmetic(right)
        case ast.UnaryOp(operand=operand):
            return _is_arithmetic(operand)
        case ast.Compare(left=left, comparators=others) | ast.BoolOp(values=[left, *others]):
            return all(map(_is_arithmetic, (left, *others)))
        case ast.Name(id=name):
            return _SYMBOL.fullmatch(name) is not None
        case ast.Constant(value=value):
            return isinstance(value, (bool, int, float)) and not abs(value) > _LARGEST_NUMBER
    return False


def _is_text(node: ast.expr, function: str) -> bool:
    """True for the name of a symbol, or the digits of a number."""
    if not (isinstance(node, ast.Constant) and isinstance(node.value, str)):
        return False
    return function in _TEXTS and _TEXTS[function].fullmatch(node.value) is not None


def _is_small(node: ast.expr) -> bool:
    """True for a literal number that is small."""
    match node:
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return _is_small(operand)
        case ast.Call(func=ast.Name(id="Integer" | "Rational"), args=arguments):
            return all(map(_is_small, arguments))
        case ast.Constant(value=value):
            return isinstance(value, (bool, int, float)) and abs(value) <= _LARGEST_EXPONENT
    return False


def _is_small_power(arguments: list[ast.expr]) -> bool:
    """True if a power is quick: the exponent is a small number or a symbol, and the base is no power."""
    if len(arguments) != 2:
        return False
    base, exponent = arguments
    is_symbol = isinstance(exponent, ast.Name) or (
        isinstance(exponent, ast.Call)
        and isinstance(exponent.func, ast.Name)
        and exponent.func.id == "Symbol"
    )
    return (is_symbol or _is_small(exponent)) and not any(map(_is_power, ast.walk(base)))


def _is_power(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in _POWERS
    return isinstance(node, ast.BinOp) and isinstance(node.op, _POWER_SIGNS)


def _any(text: str) -> str:
    return text


_STRINGS: dict[str, Callable[[str], str]] = {
    "name": _identifier,
    "as_name": _identifier,
    "forward_arg_names": _identifier,
    "target": _operator,
    "as_operator": _operator,
    "in_spec": _tree,
    "out_spec": _tree,
    "expr_str": _expression,
    # Arguments of operators, which generated code holds as literals.
    "as_string": _any,
    "as_strings": _any,
}

# Stack traces of the export, and Python code of guards: conch checks shapes itself.
_DROPPED: dict[str, Callable[[], Any]] = {"metadata": dict, "guards_code": list}
