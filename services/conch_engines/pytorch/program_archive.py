"""Reads PT2 archives of exported programs without `torch.export.load`, which runs code that is in them.

PyTorch's loader unpickles without restriction: objects among the constants, whole weights of older versions,
sample inputs, and all of the format before, which it tries if anything else fails. Here only known members
are read, all through one reader: the program's JSON, which `program_graph` checks, raw tensors, and pickled
tensors with ``weights_only``. Sample inputs are not needed.
"""

from __future__ import annotations

import ast
import io
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_PROGRAM = "models/model.json"
_SAMPLES = "data/sample_inputs/model.pt"
_PLAIN = re.compile(
    r"archive_format|archive_version|byteorder|\.data/(version|serialization_id)|\.format_version|"
    r"\.storage_alignment|extra/.*|" + re.escape(_PROGRAM) + "|" + re.escape(_SAMPLES)
)
_PAYLOADS = re.compile(r"data/(weights|constants)/(model\.pt|model_\1_config\.json|(weight|tensor)_\d+)")
_MOST_JSON_BYTES = 256 << 20


def load(torch: Any, path: Path) -> Any:
    """An exported program."""
    from torch._export.serde import schema, serialize

    archive = _Archive(torch, path)
    program = checked(archive.json(_PROGRAM))
    return serialize.ExportedProgramDeserializer().deserialize(
        serialize._dict_to_dataclass(schema.ExportedProgram, program),
        archive.tensors("weights"),
        archive.tensors("constants"),
    )


class _Archive:
    """An open archive whose members are all known."""

    def __init__(self, torch: Any, path: Path) -> None:
        self._torch = torch
        self._reader = torch._C.PyTorchFileReader(str(path))
        self._size = path.stat().st_size
        names = self._reader.get_all_records()
        # PyTorch's reader takes upper and lower case for the same.
        if len({name.casefold() for name in names}) != len(names):
            raise RefusedProgramError("it holds several members of one name")
        for name in names:
            if not (_PLAIN.fullmatch(name) or _PAYLOADS.fullmatch(name)):
                raise RefusedProgramError(f"member '{name[:100]}' belongs to no exported program")
        self._names = frozenset(names)

    def json(self, name: str) -> dict[str, Any]:
        """A member with a JSON object."""
        return _object(json.loads(self._bytes(name, _MOST_JSON_BYTES)))

    def _bytes(self, name: str, limit: int) -> bytes:
        if self._bytes_of(name) > limit:
            raise ValueError(f"member '{name}' has more than {limit} bytes")
        read: bytes = self._reader.get_record(name)
        return read

    def tensors(self, kind: str) -> dict[str, Any]:
        """The weights or constants, by name."""
        whole = f"data/{kind}/model.pt"  # of PyTorch before 2.9
        if whole in self._names:
            found = self._unpickled(whole)
            return _object(found) if found else {}
        described = self.json(f"data/{kind}/model_{kind}_config.json")
        raw: dict[str, Any] = {}
        return {
            fqn: self._tensor(f"data/{kind}/{entry['path_name']}", _object(entry), raw)
            for fqn, entry in _object(described["config"]).items()
        }

    def _tensor(self, name: str, entry: Mapping[str, Any], raw: dict[str, Any]) -> Any:
        """A tensor; several may lie in one member."""
        if name not in self._names or not _PAYLOADS.fullmatch(name):
            raise RefusedProgramError(f"'{name[:100]}' holds an object that is no tensor")
        if entry["use_pickle"]:
            return self._unpickled(name)
        meta = entry["tensor_meta"]
        if name not in raw:
            raw[name] = self._raw(name, meta)
        sizes, strides = ([each["as_int"] for each in meta[key]] for key in ("sizes", "strides"))
        tensor = self._torch.as_strided(raw[name], sizes, strides, meta["storage_offset"]["as_int"])
        if entry["is_param"]:
            return self._torch.nn.Parameter(tensor, requires_grad=bool(meta["requires_grad"]))
        return tensor

    def _raw(self, name: str, meta: Mapping[str, Any]) -> Any:
        """The numbers of a member as one flat tensor on its device."""
        from torch._export.serde.serialize import _SERIALIZE_TO_TORCH_DTYPE

        dtype = _SERIALIZE_TO_TORCH_DTYPE[meta["dtype"]]
        count, rest = divmod(self._bytes_of(name), dtype.itemsize)
        if rest:
            raise ValueError(f"member '{name}' has not the size of a tensor of {dtype}")
        tensor = self._torch.empty(0, dtype=dtype)
        if count:
            read = self._reader.get_storage_from_record(name, count, dtype)
            tensor.set_(read.untyped_storage(), 0, (count,), (1,))
        device = self._torch.device(meta["device"]["type"], meta["device"]["index"] or 0)
        return tensor if device.type == "cpu" else tensor.to(device)

    def _unpickled(self, name: str) -> Any:
        read = self._bytes(name, self._size)
        if not read:
            return None
        try:
            return self._torch.load(io.BytesIO(read), weights_only=True)
        except Exception as error:  # of the engine: a pickle made by hand can fail in any way
            raise RefusedProgramError(f"'{name}' holds Python objects that are no tensors") from error

    def _bytes_of(self, name: str) -> int:
        if not hasattr(
            self._reader, "get_record_size"
        ):  # PyTorch before 2.9, whose archives are pickled whole
            return len(self._reader.get_record(name))
        size: int = self._reader.get_record_size(name)
        if size > self._size:  # nothing in such an archive is compressed
            raise ValueError(f"member '{name}' is larger than the file")
        return size


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"expected an object, got {type(value).__name__}")
    return value


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
    """A copy of a program's JSON without what is not needed to run it."""
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
    # Python code, which `program_guards` reads and PyTorch is not asked to run.
    "guards_code": _any,
    # Arguments of operators, which generated code holds as literals.
    "as_string": _any,
    "as_strings": _any,
}

# Stack traces of the export.
_DROPPED: dict[str, Callable[[], Any]] = {"metadata": dict}
