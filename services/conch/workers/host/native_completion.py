"""Completes a config with a library that is compiled for Triton."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from conch.core.errors import InternalError, UnavailableError
from conch.ipc.spec_json import Library
from conch.workers.host.native_library import HostLibrary, waiting_buffer
from conch.workers.host.native_model import LEVELS, open_library, record_log
from conch.workers.host.native_words import LogText, ModelCall, Query, pack_error, read_events

_SCHEDULING = {"dynamic_batching": 11, "sequence_batching": 13, "ensemble_scheduling": 15}
"""Choices, with their numbers in Triton's message."""

_INPUT = {
    "format": "FORMAT_NONE",
    "is_shape_tensor": False,
    "allow_ragged_batch": False,
    "optional": False,
    "is_non_linear_format_io": False,
}
_OUTPUT = {"label_filename": "", "is_shape_tensor": False, "is_non_linear_format_io": False}
_DYNAMIC = {
    "preferred_batch_size": [],
    "max_queue_delay_microseconds": 0,
    "preserve_ordering": False,
    "priority_levels": 0,
    "default_priority_level": 0,
    "priority_queue_policy": {},
}
_WAIT_MS = 100


def complete_with_library(
    config: dict[str, Any], version_directory: Path, library: Library, has_gpus: bool
) -> dict[str, Any]:
    """The config as the library completes it in ModelInitialize.

    Raises:
        ConchError: A call of the library failed.
    """
    model_log = logging.getLogger(config.get("name", ""))
    host = HostLibrary(library.host)
    host.set_log_levels(sum(model_log.isEnabledFor(level) << index for index, level in enumerate(LEVELS)))
    host.report_crashes()
    facts = open_library(host, library, model_log)
    over = threading.Event()
    events = threading.Thread(target=_handle_events, args=(host, model_log, over), daemon=True)
    events.start()
    completed = config
    try:

        def set_config(text: str) -> None:
            nonlocal completed
            completed = merged(completed, json.loads(text))
            host.set_config(json.dumps(completed))

        host.open_model(
            config.get("name", ""),
            int(version_directory.name),
            version_directory.parent,
            json.dumps(config),
            True,
            bool(config.get("model_transaction_policy", {}).get("decoupled")),
            bool(config.get("sequence_batching", {}).get("iterative_sequence")),
            set_config,
        )
    finally:
        over.set()
        host.wake()
        events.join()
    return with_groups(completed, facts.get("preferred_groups") or [], has_gpus)


def merged(config: dict[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """A config with what a backend may set: tensors, batch size, scheduling if there was none, decoupled.

    Raises:
        InternalError: The backend would replace the scheduling.
    """
    result = dict(config)
    if "max_batch_size" in wanted:
        result["max_batch_size"] = wanted["max_batch_size"]
    result["input"] = [{**_INPUT, **tensor} for tensor in wanted.get("input") or ()]
    result["output"] = [{**_OUTPUT, **tensor} for tensor in wanted.get("output") or ()]
    before = next((name for name in _SCHEDULING if name in config), None)
    after = next((name for name in _SCHEDULING if name in wanted), None)
    if before is None and after is not None:
        result[after] = {**(_DYNAMIC if after == "dynamic_batching" else {}), **wanted[after]}
    elif after != before and after is not None and before is not None:
        raise InternalError(
            f"Cannot update scheduling choice from {_SCHEDULING[before]} to {_SCHEDULING[after]} when "
            f"auto-completing."
        )
    policy = wanted.get("model_transaction_policy")
    if policy is not None:
        result["model_transaction_policy"] = {"decoupled": bool(policy.get("decoupled"))}
    return result


def with_groups(config: dict[str, Any], preferred: list[dict[str, Any]], has_gpus: bool) -> dict[str, Any]:
    """A config with the first instance group that the backend prefers and that is usable, if it has none.

    Counts that are left out become those that the backend prefers for the kind.
    """
    usable = [group for group in preferred if has_gpus or group["kind"] != "KIND_GPU"]
    groups = config.get("instance_group") or []
    if not groups:
        return {**config, "instance_group": [_group(each) for each in usable[:1]]}
    counts = {group["kind"]: group["count"] for group in reversed(usable)}
    filled = [{**group, "count": group.get("count") or counts.get(group.get("kind"), 0)} for group in groups]
    return {**config, "instance_group": filled}


def _group(preferred: Mapping[str, Any]) -> dict[str, Any]:
    return {"kind": preferred["kind"], "count": preferred["count"], "gpus": preferred.get("gpus") or []}


def _handle_events(host: HostLibrary, model_log: logging.Logger, over: threading.Event) -> None:
    buffer = waiting_buffer()
    refusal = UnavailableError("the server can't be called while a config is completed")
    while True:
        ending = over.is_set()
        count = host.wait(buffer, _WAIT_MS)
        for event in read_events(buffer.data, count):
            if isinstance(event, LogText):
                record_log(model_log, event)
            elif isinstance(event, Query):
                host.refuse(event.call, refusal)
            elif isinstance(event, ModelCall):
                host.call_taken(event.call)
                host.reply(event.call, pack_error(event, refusal))
        if ending and not count:
            return
