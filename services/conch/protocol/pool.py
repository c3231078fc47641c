# SPDX-License-Identifier: Apache-2.0
"""Loads conch's messages into a separate descriptor pool, and looks up files for server reflection.

protoc's Python output registers in protobuf's default pool, where tritonclient defines the same names,
which is an error. The ``_pb2`` modules here are filled from ``descriptors.binpb`` instead; this also avoids
the check that ties protoc's output to one range of protobuf versions.
Threads and locks: one lock while classes are made; the rest is read-only.
"""

import pkgutil
import threading
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor import Descriptor
from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper
from google.protobuf.message import Message

__all__ = [
    "POOL",
    "file_containing_symbol",
    "file_descriptor_protos",
    "file_with_dependencies",
    "fill_module",
]

DESCRIPTOR_SET = "descriptors.binpb"

POOL = descriptor_pool.DescriptorPool()
"""Holds every file of ``proto/`` and nothing else."""

# A message's class is made with those of its fields: without a lock, two imports could make it twice.
_lock = threading.Lock()


def _load() -> dict[str, bytes]:
    data = pkgutil.get_data(__package__, DESCRIPTOR_SET)
    if data is None:
        raise ImportError(f"{DESCRIPTOR_SET} is missing from the package {__package__}")
    files = {}
    # protoc writes imported files first, so one pass is enough.
    for file in descriptor_pb2.FileDescriptorSet.FromString(data).file:
        files[file.name] = file.SerializeToString()
        POOL.AddSerializedFile(files[file.name])
    return files


_files = _load()


def fill_module(namespace: dict[str, Any], file_name: str) -> None:
    """Defines the names that protoc's output for a file would define.

    Args:
        namespace: Globals of the module to fill.
        file_name: Name of a file in the pool, such as ``"inference/grpc_service.proto"``.
    """
    module = namespace["__name__"]
    with _lock:
        file = POOL.FindFileByName(file_name)
        namespace["DESCRIPTOR"] = file
        for name, message in file.message_types_by_name.items():
            namespace[name] = _message_class(message, module)
        for name, enum in file.enum_types_by_name.items():
            namespace[name] = EnumTypeWrapper(enum)
            namespace.update({value.name: value.number for value in enum.values})


def _message_class(descriptor: Descriptor, module: str, outer: str = "") -> type[Message]:
    cls = message_factory.GetMessageClass(descriptor)
    # Pickle and copy find classes by these.
    cls.__module__ = module
    cls.__qualname__ = outer + descriptor.name
    for nested in descriptor.nested_types:
        # Only the C runtimes set nested classes themselves.
        setattr(cls, nested.name, _message_class(nested, module, cls.__qualname__ + "."))
    return cls


def file_descriptor_protos() -> Mapping[str, bytes]:
    """Returns all files as serialized ``FileDescriptorProto``, by name, imported ones first."""
    return MappingProxyType(_files)


def file_with_dependencies(file_name: str) -> list[bytes]:
    """Returns a file and its transitive imports as serialized ``FileDescriptorProto``, the file first.

    Raises:
        KeyError: There is no such file.
    """
    if file_name not in _files:
        raise KeyError(f"no file named '{file_name}'")
    names = {file_name: None}
    pending = [POOL.FindFileByName(file_name)]
    while pending:
        for dependency in pending.pop().dependencies:
            if dependency.name not in names:
                names[dependency.name] = None
                pending.append(dependency)
    return [_files[name] for name in names]


def file_containing_symbol(symbol: str) -> str:
    """Returns the name of the file that declares a symbol.

    Args:
        symbol: Full name of a service, method, message, field, enum or enum value, without a leading dot.

    Raises:
        KeyError: No file declares it.
    """
    try:
        return str(POOL.FindFileContainingSymbol(symbol).name)
    except KeyError:
        pass
    # The C runtime does not find methods there.
    service, _, method = symbol.rpartition(".")
    try:
        descriptor = POOL.FindServiceByName(service)
    except KeyError:
        descriptor = None
    if descriptor is None or method not in descriptor.methods_by_name:
        raise KeyError(f"no file declares '{symbol}'")
    return str(descriptor.file.name)
