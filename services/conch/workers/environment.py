"""The environment of a worker process: interpreter, variables, further module paths.

The server knows its own. `OwnEnvironment` is that of a model which asks for another one; add-ons have some.
"""

from __future__ import annotations

import os
import re
import sys
from abc import ABC, abstractmethod
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
    TRITON_CACHE_DIR TRITON_PARALLEL_INSTANCE_LOADING MPLCONFIGDIR
"""
_PREFIXES = """
    LC_ XDG_ PYTHON MALLOC_ OMP_ GOMP_ KMP_ MKL_ OPENBLAS_ NUMEXPR_ NUMBA_
    VLLM_ RAY_ GLOO_
    CUDA_ CUDNN_ CUBLAS_ NVIDIA_ NCCL_ TORCH_ PYTORCH_ TORCHINDUCTOR_ TF_ XLA_ JAX_ ORT_
"""

NAMES = frozenset(_NAMES.split())
"""Variables that workers inherit."""

PREFIXES = tuple(_PREFIXES.split())
"""Prefixes of further inherited variables, unless the name looks like a secret's."""

# Numbers of tokens are none.
_SECRET = re.compile("KEY|TOKEN(?!S)|SECRET|PASS|CREDENTIAL|AUTH", re.IGNORECASE)


def is_inherited(name: str) -> bool:
    """True if workers inherit a variable without being configured to."""
    return name in NAMES or (name.startswith(PREFIXES) and _SECRET.search(name) is None)


def inherited() -> dict[str, str]:
    """Variables of the server that all workers inherit."""
    return {name: value for name, value in os.environ.items() if is_inherited(name)}


def named(patterns: Iterable[str]) -> dict[str, str]:
    """Other variables of the server, selected by name or by patterns such as ``AWS_*``."""
    wanted = list(patterns)
    return {
        name: value
        for name, value in os.environ.items()
        if not is_inherited(name) and any(fnmatchcase(name, pattern) for pattern in wanted)
    }


@dataclass(frozen=True, slots=True)
class Environment:
    """An environment for workers of a model.

    The workers' template starts as ``python -X faulthandler script ...`` with exactly these variables.
    ``-I`` is not needed: unwanted variables are filtered out, and in the server's own environment
    ``PYTHONPATH`` applies to workers as to the server. The script removes its own folder from `sys.path` and
    appends `paths`.

    Attributes:
        python: Absolute path of the interpreter, links unresolved: an interpreter finds its environment by
            the link that started it.
        variables: The complete environment of the process.
        paths: Directories appended to `sys.path`.
        label: Description for messages: ``the server's environment``, or a file and its kind.
        version: The interpreter's version, such as ``3.12.1``.
        release: Allows the removal of the environment; call it when no worker runs or will start in it. May
            be called more than once.
    """

    python: Path
    variables: Mapping[str, str]
    paths: tuple[Path, ...] = ()
    label: str = "the server's environment"
    version: str = ""
    release: Callable[[], None] = field(default=lambda: None, compare=False, repr=False)


def server_environment(added: Mapping[str, str] | None = None) -> Environment:
    """The server's own interpreter with inherited variables and `added` ones.

    Raises:
        UnavailableError: The interpreter is unknown, as in embedded Python.
    """
    if not sys.executable:
        raise UnavailableError("this program has no Python interpreter that workers could be started with")
    version = ".".join(str(part) for part in sys.version_info[:3])
    return Environment(Path(sys.executable), {**inherited(), **(added or {})}, version=version)


class OwnEnvironment(ABC):
    """An environment that a model asks for instead of the server's.

    An add-on finds them by the entry-point group ``conch.environments``: a function of the model's name, its
    version directory, its model file, the parameters of its config and the options of its backend, which
    returns an `OwnEnvironment`, or None if the model asks for none. It raises ConchError for a file or a
    setting that is wrong, and makes nothing.

    Attributes:
        reason: Setting or file that asks for it, for messages.
    """

    reason: str

    @abstractmethod
    def make(self, variables: Mapping[str, str]) -> Environment:
        """Makes it if needed, with these variables besides the inherited ones; may take minutes.

        Raises:
            ConchError: It can't be made or can't run models; the text names the file. Or the load was
                stopped.
        """
