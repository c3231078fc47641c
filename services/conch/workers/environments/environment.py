"""What a worker process is started with: an interpreter, its variables, and further places of modules."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from conch.core.errors import UnavailableError

_NAMES = """
    PATH HOME USER LOGNAME SHELL HOSTNAME PWD TERM LANG LANGUAGE TZ TZDIR TMPDIR TMP TEMP
    LD_LIBRARY_PATH LD_PRELOAD GLIBC_TUNABLES VIRTUAL_ENV CONDA_PREFIX CONDA_DEFAULT_ENV __PYVENV_LAUNCHER__
    SSL_CERT_FILE SSL_CERT_DIR REQUESTS_CA_BUNDLE CURL_CA_BUNDLE
    HF_HOME HF_HUB_CACHE HF_HUB_OFFLINE TRANSFORMERS_CACHE TRANSFORMERS_OFFLINE TOKENIZERS_PARALLELISM
    TRITON_CACHE_DIR MPLCONFIGDIR
"""
_PREFIXES = """
    LC_ XDG_ PYTHON MALLOC_ OMP_ GOMP_ KMP_ MKL_ OPENBLAS_ NUMEXPR_ NUMBA_
    CUDA_ CUDNN_ CUBLAS_ NVIDIA_ NCCL_ TORCH_ PYTORCH_ TORCHINDUCTOR_ TF_ XLA_ JAX_ ORT_
"""

NAMES = frozenset(_NAMES.split())
"""Variables that workers inherit."""

PREFIXES = tuple(_PREFIXES.split())
"""Variables whose names begin so are inherited too, unless the name sounds like that of a secret."""

_SECRET = re.compile("KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH", re.IGNORECASE)


def is_inherited(name: str) -> bool:
    """Whether workers inherit a variable that nothing names."""
    return name in NAMES or (name.startswith(PREFIXES) and _SECRET.search(name) is None)


def inherited() -> dict[str, str]:
    """The variables that all workers inherit."""
    return {name: value for name, value in os.environ.items() if is_inherited(name)}


def named(patterns: Iterable[str]) -> dict[str, str]:
    """The other variables of the server that are named, by their names or by patterns such as ``AWS_*``."""
    wanted = list(patterns)
    return {
        name: value
        for name, value in os.environ.items()
        if not is_inherited(name) and any(fnmatchcase(name, pattern) for pattern in wanted)
    }


@dataclass(frozen=True, slots=True)
class Environment:
    """Where a worker of a model runs.

    A worker is started as ``python -X faulthandler script`` and arguments, with exactly these variables.
    ``-I`` is not needed: what must not reach the interpreter is not among the variables, and in the server's
    own environment ``PYTHONPATH`` and the like count for workers as they do for the server. The script takes
    its own folder off `sys.path` and puts `paths` at the end.

    Attributes:
        python: The interpreter. Absolute, and never resolved: an interpreter knows the environment that it
            belongs to by the link that it was started through.
        variables: The whole environment of the process, not only what is added to the server's.
        paths: Directories for the end of `sys.path`, behind everything that is installed there.
        label: What it is, for messages: ``the server's environment``, or a file and its kind.
        version: The interpreter's version, such as ``3.12.1``.
        release: Gives up what keeps the environment from being removed; to be called, once or more often,
            when no worker will be started in it and none runs there any more.
    """

    python: Path
    variables: Mapping[str, str]
    paths: tuple[Path, ...] = ()
    label: str = "the server's environment"
    version: str = ""
    release: Callable[[], None] = field(default=lambda: None, compare=False, repr=False)


def server_environment(added: Mapping[str, str] | None = None) -> Environment:
    """The interpreter that this program runs in, with those of its variables that workers inherit.

    Args:
        added: Variables on top of those.

    Raises:
        UnavailableError: The program does not know its interpreter, as where Python is embedded in another.
    """
    if not sys.executable:
        raise UnavailableError("this program has no Python interpreter that workers could be started with")
    version = ".".join(str(part) for part in sys.version_info[:3])
    return Environment(Path(sys.executable), {**inherited(), **(added or {})}, version=version)
