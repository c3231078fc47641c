"""Triton flags without a use here: values without effect are accepted, others are refused with a reason."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from conch.cli.settings.setting import Setting
from conch.cli.settings.value_types import BOOL, NATURAL, POOL, TEXT, ValueType

_OFF = ("false", "off", "0")


def _ignored(name: str, kind: ValueType[Any]) -> Setting[Any]:
    return Setting(kind, None, repeatable=True, listed=False, key=name)


def _refused(reason: str, **harmless: tuple[str, ...]) -> Iterator[Setting[Any]]:
    for key, values in harmless.items():
        yield Setting(
            BOOL if values == _OFF else TEXT,
            None,
            choices=values,
            repeatable=True,
            unsupported=reason,
            listed=False,
            key=key,
        )


UNSUPPORTED: tuple[Setting[Any], ...] = (
    *_refused(
        "SageMaker's routes are not served",
        allow_sagemaker=_OFF,
        sagemaker_port=("8080",),
        sagemaker_safe_port_range=(),
        sagemaker_thread_count=("8",),
    ),
    *_refused(
        "Vertex AI's routes are not served",
        allow_vertex_ai=_OFF,
        vertex_ai_port=("8080",),
        vertex_ai_thread_count=("8",),
        vertex_ai_default_model=(),
    ),
    *_refused(
        "there is no tracing yet",
        trace_config=("level=off", "mode=triton", "rate=1000", "count=-1", "triton,log-frequency=0"),
        trace_level=("off",),
        trace_file=(),
        trace_rate=("1000",),
        trace_count=("-1",),
        trace_log_frequency=("0",),
    ),
    *_refused("states of sequences do not grow in place", cuda_virtual_address_size=()),
    *_refused("responses have no pool", grpc_max_response_pool_size=(str(2**31 - 1),)),
    *_refused("tensors are copied by the threads that need them", buffer_manager_thread_count=("0",)),
    *_refused("loads do not look at the memory of GPUs", model_load_gpu_limit=()),
    *_refused("instances are not bound to processors", host_policy=()),
    # Any value holds: no pool exceeds its limit, GPUs exchange nothing directly, and caches and repository
    # agents are built in (others are refused by name).
    _ignored("pinned_memory_pool_byte_size", NATURAL),
    _ignored("cuda_memory_pool_byte_size", POOL),
    _ignored("grpc_infer_allocation_pool_size", NATURAL),
    _ignored("enable_peer_access", BOOL),
    _ignored("cache_directory", TEXT),
    _ignored("repoagent_directory", TEXT),
)
