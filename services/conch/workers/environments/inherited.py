"""Which of the server's environment variables its workers inherit.

A server's environment holds what only the server needs: keys of object stores, passwords of caches, tokens of
whatever started it. Workers run the code of models, so they get the variables listed here and those that a
model's config or the operator names; see docs/python-models.md.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from fnmatch import fnmatchcase

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
