"""Tensors of a load in system shared memory, which the server maps.

One object has the inputs of all requests, another one their outputs, each tensor at a place of its own. The
names in /dev/shm are removed as soon as the server has mapped the objects, so that nothing stays there
however this process ends; the server's regions are unregistered after the load.
"""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any

from conch_tools.perf.load.ready_requests import InputTensor, Place, dtype_of
from conch_tools.server_api import AskError, ServerApi

_DIRECTORY = "/dev/shm"
_ALIGNED = 64

Placed = tuple[Sequence[InputTensor], Mapping[str, Place]]
"""Inputs of a request, and where its outputs go."""


def output_sizes(config: Mapping[str, Any], batch: int, variable: int) -> dict[str, int]:
    """Bytes of each output of a model; of those without a fixed size ``variable``."""
    rows = batch if int(config.get("max_batch_size", 0)) > 0 else 1
    found = {}
    for each in config.get("output", ()):
        dims = [int(dim) for dim in each.get("dims", ())]
        datatype = each["data_type"].removeprefix("TYPE_")
        if datatype == "STRING" or -1 in dims:
            found[each["name"]] = variable
        else:
            width = 2 if datatype == "BF16" else dtype_of(datatype).itemsize
            found[each["name"]] = rows * math.prod(dims) * width
    return found


@contextmanager
def shared_tensors(
    api: ServerApi, streams: Sequence[Sequence[Sequence[InputTensor]]], outputs: Mapping[str, int]
) -> Iterator[list[list[Placed]]]:
    """The requests of a load with their places, for as long as the server has the regions.

    Raises:
        AskError: The server does not take the regions, or there is no memory for them.
    """
    prefix = f"perf_{secrets.token_hex(8)}"  # servers reserve names with theirs
    inputs_size = outputs_size = 0
    placed: list[list[Placed]] = []
    written: list[tuple[int, bytes]] = []
    for stream in streams:
        placed.append([])
        for tensors in stream:
            inputs = []
            for tensor in tensors:
                if not tensor.data:
                    inputs.append(tensor)  # a region has no part of 0 bytes
                    continue
                inputs.append(replace(tensor, place=Place(f"{prefix}_in", inputs_size, len(tensor.data))))
                written.append((inputs_size, tensor.data))
                inputs_size += _aligned(len(tensor.data))
            places = {}
            for name, size in outputs.items():
                if size:
                    places[name] = Place(f"{prefix}_out", outputs_size, size)
                    outputs_size += _aligned(size)
            placed[-1].append((inputs, places))
    with ExitStack() as regions:
        if inputs_size:
            regions.enter_context(_region(api, f"{prefix}_in", inputs_size, written))
        if outputs_size:
            regions.enter_context(_region(api, f"{prefix}_out", outputs_size, ()))
        yield placed


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


@contextmanager
def _region(api: ServerApi, name: str, size: int, parts: Sequence[tuple[int, bytes]]) -> Iterator[None]:
    path = f"{_DIRECTORY}/{name}"
    asked = False
    try:
        try:
            _write(path, size, parts)
        except OSError as error:
            text = f"--shm system: no {size} bytes in /dev/shm: {error.strerror or error}"
            raise AskError(text, True) from None
        asked = True
        try:
            api.register_system_region(name, f"/{name}", size)
        except AskError as error:
            text = f"--shm system: {error} (the server must be on this machine and see its /dev/shm)"
            raise AskError(text, error.reached) from None
        os.unlink(path)
        yield
    finally:
        with suppress(FileNotFoundError):
            os.unlink(path)
        if asked:
            with suppress(AskError):  # the server has ended, and the region with it
                api.unregister_system_region(name)


def _write(path: str, size: int, parts: Sequence[tuple[int, bytes]]) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, size)  # or a full /dev/shm would be a SIGBUS of the server
        for offset, data in parts:
            done = 0
            while done < len(data):
                done += os.pwrite(descriptor, memoryview(data)[done:], offset + done)
    finally:
        os.close(descriptor)
