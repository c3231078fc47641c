"""Parameters of PyTorch models, and threads of PyTorch.

Threads and locks: PyTorch keeps the number of threads per calling thread, so each run sets that of its model;
inter-op threads and switches of the TorchScript compiler are the process's, and the first model that names
one decides. `ProcessSettings` guards them with a lock.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import Any

from conch.core.backend import ConfigNotes
from conch.core.spec import ModelSpec
from conch_engines.model_config import boolean, integer, threads_per_instance

log = logging.getLogger(__name__)

ALLOW_PICKLE = "CONCH_ALLOW_PICKLE"
"""Model parameter: whether Python objects in a PT2 archive are unpickled, which can run any code."""

WARMUP_RUNS = "CONCH_WARMUP_RUNS"
"""Model parameter: least number of runs of each warm-up sample."""

SHARING = "ENABLE_WEIGHT_SHARING"
"""Model parameter: whether instances on one device share a module."""

_WARMUP_RUNS = 3  # TorchScript's profiling executor compiles in the second run of each shape family

_SWITCHES = {
    "ENABLE_TENSOR_FUSER": "_jit_set_texpr_fuser_enabled",
    "ENABLE_JIT_EXECUTOR": "_jit_set_profiling_executor",
    "ENABLE_JIT_PROFILING": "_jit_set_profiling_mode",
}

PARAMETERS = (
    ALLOW_PICKLE,
    WARMUP_RUNS,
    "CONCH_TORCH_CLASS",
    "DISABLE_OPTIMIZED_EXECUTION",
    "INFERENCE_MODE",
    "DISABLE_CUDNN",
    SHARING,
    "ENABLE_CACHE_CLEANING",
    "CACHE_CLEANING_ENABLED",
    "INTER_OP_THREAD_COUNT",
    "INTRA_OP_THREAD_COUNT",
    *_SWITCHES,
    *("NUM_THREADS", "NUM_INTEROP_THREADS", "TORCH_COMPILE_OPTIONAL_PARAMETERS"),  # of Python classes
)


@dataclass(frozen=True, slots=True)
class TorchSettings:
    """Parameters of one model.

    Attributes:
        inference_mode: True if runs are in inference mode; else only gradients are off.
        optimized: True if TorchScript's graph executor optimises.
        cudnn: True if cuDNN is used.
        shares_weights: True if instances on one device share the module.
        cleans_cache: True if the device's cached memory is freed after each run.
        threads: Threads of one run.
        allow_pickle: True if Python objects may be unpickled.
        warmup_runs: Least number of runs of each warm-up sample.
    """

    inference_mode: bool
    optimized: bool
    cudnn: bool
    shares_weights: bool
    cleans_cache: bool
    threads: int
    allow_pickle: bool
    warmup_runs: int

    @classmethod
    def of(cls, spec: ModelSpec) -> TorchSettings:
        """Reads a config."""
        parameters = spec.parameters
        threads = integer(parameters, "INTRA_OP_THREAD_COUNT", 0, least=0)
        integer(parameters, "INTER_OP_THREAD_COUNT", 0, least=0)
        for key in _SWITCHES:
            boolean(parameters, key, False)
        return cls(
            inference_mode=boolean(parameters, "INFERENCE_MODE", True),
            optimized=not boolean(parameters, "DISABLE_OPTIMIZED_EXECUTION", False),
            cudnn=not boolean(parameters, "DISABLE_CUDNN", False),
            shares_weights=boolean(parameters, SHARING, True),
            # Triton reads the second name for PT2 archives.
            cleans_cache=boolean(parameters, "ENABLE_CACHE_CLEANING", False)
            or boolean(parameters, "CACHE_CLEANING_ENABLED", False),
            threads=threads or threads_per_instance(spec),
            allow_pickle=boolean(parameters, ALLOW_PICKLE, False),
            warmup_runs=integer(parameters, WARMUP_RUNS, _WARMUP_RUNS, least=1),
        )

    def log(self, spec: ModelSpec) -> None:
        """Logs the switches in Triton's words, if the config has parameters."""
        parameters = spec.parameters
        switches = {
            "Optimized execution": self.optimized,
            "Cache Cleaning": self.cleans_cache,
            "Inference Mode": self.inference_mode,
            "cuDNN": self.cudnn,
        }
        named = {
            "Tensor fuser": "ENABLE_TENSOR_FUSER",
            "Weight sharing": SHARING,
            "Jit profiling": "ENABLE_JIT_PROFILING",
            "Jit executor": "ENABLE_JIT_EXECUTOR",
        }
        given = {what: key for what, key in named.items() if key in parameters}
        switches.update((what, boolean(parameters, key, False)) for what, key in given.items())
        for what, is_on in switches.items() if parameters else ():
            state = "enabled" if is_on else "disabled"
            log.info("%s is %s for model instance '%s'", what, state, spec.name)


class ProcessSettings:
    """Settings of PyTorch that all models of the process have in common."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._lock = threading.Lock()  # guards the table
        self._set: dict[str, tuple[int, str]] = {}

    def apply(self, spec: ModelSpec, notes: ConfigNotes) -> None:
        """Applies those that the config names; notes those that another model has set otherwise."""
        inter_op = integer(spec.parameters, "INTER_OP_THREAD_COUNT", 0, least=0)
        if inter_op:
            self._apply(spec, notes, "INTER_OP_THREAD_COUNT", inter_op)
        for key in _SWITCHES:
            if key in spec.parameters:
                self._apply(spec, notes, key, int(boolean(spec.parameters, key, False)))

    def _apply(self, spec: ModelSpec, notes: ConfigNotes, key: str, value: int) -> None:
        with self._lock:
            before = self._set.get(key)
            if before is None:
                try:
                    self._change(key, value)
                except RuntimeError as error:  # inter-op work has begun
                    notes.add(f"parameter '{key}' of model '{spec.name}' has no effect: {error}")
                    return
                self._set[key] = value, spec.name
        if before is not None and before[0] != value:
            notes.add(
                f"parameter '{key}' of model '{spec.name}' has no effect: model '{before[1]}' set it to "
                f"{before[0]} for the process"
            )

    def _change(self, key: str, value: int) -> None:
        if key == "INTER_OP_THREAD_COUNT":
            self._torch.set_num_interop_threads(value)
        else:
            getattr(self._torch._C, _SWITCHES[key])(bool(value))
