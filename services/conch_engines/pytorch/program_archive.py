"""Reads PT2 archives of exported programs without `torch.export.load`, which runs code that is in them.

PyTorch's loader unpickles without restriction: objects among the constants, whole weights of older versions,
sample inputs, and all of the format before, which it tries if anything else fails. Here only known members
are read, all through one reader: the program's JSON, which `program_graph` checks, raw tensors, and pickled
tensors with ``weights_only``. Sample inputs are not needed.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from conch_engines.pytorch import program_graph
from conch_engines.pytorch.program_graph import RefusedProgramError

_PROGRAM = "models/model.json"
_SAMPLES = "data/sample_inputs/model.pt"
_PLAIN = re.compile(
    r"archive_format|archive_version|byteorder|\.data/(version|serialization_id)|\.format_version|"
    r"\.storage_alignment|extra/.*|" + re.escape(_PROGRAM) + "|" + re.escape(_SAMPLES)
)
_PAYLOADS = re.compile(r"data/(weights|constants)/(model\.pt|model_\1_config\.json|(weight|tensor)_\d+)")
_MOST_JSON_BYTES = 256 << 20


def load(torch: Any, path: Path) -> Any:
    """An exported program.

    Raises:
        RefusedProgramError: The archive holds something that could run code.
        Exception: It is damaged.
    """
    from torch._export.serde import schema, serialize

    archive = _Archive(torch, path)
    program = program_graph.checked(archive.json(_PROGRAM))
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
        except Exception as error:  # a pickle made by hand can fail in any way
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
