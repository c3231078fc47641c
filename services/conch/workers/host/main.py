"""Entry point of a worker process: ``python -X faulthandler main.py ROLE FD PACKAGE MODULE PATH...``.

The interpreter may belong to another environment than the server's. conch's own packages are found at the
given paths; further paths come behind everything that is installed there. Imports that need them are late.
"""

from __future__ import annotations

import ctypes
import io
import os
import signal
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from types import ModuleType

_PR_SET_PDEATHSIG = 1


class Finder(MetaPathFinder):
    """Finds top-level modules by name at given files or package folders."""

    def __init__(self, paths: dict[str, str]) -> None:
        self._paths = paths

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Spec of a given module, or None."""
        place = self._paths.get(fullname)
        if place is None:
            return None
        if place.endswith(".py"):
            return spec_from_file_location(fullname, place)
        return spec_from_file_location(fullname, f"{place}/__init__.py", submodule_search_locations=[place])


def end_with_parent() -> None:
    """Makes the kernel kill this process when the thread that started it ends, even during C code.

    If the server has died before, its end of the socket is closed, and reading ends the process.

    Raises:
        OSError: The kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def main(arguments: Sequence[str]) -> None:
    """Runs the role on the socket whose descriptor is given."""
    role, descriptor, package, module, *paths = arguments
    own = os.path.dirname(os.path.realpath(__file__))  # Python, too, follows links on the way to a script
    sys.path[:] = [path for path in sys.path if path != own]  # models may have modules of the same names
    sys.path += [path for path in paths if path not in sys.path]
    stub = os.path.join(os.path.dirname(module), "c_python_backend_utils.py")
    found = {"conch": package, "triton_python_backend_utils": module, "c_python_backend_utils": stub}
    sys.meta_path.insert(0, Finder(found))
    end_with_parent()
    from conch.core.process_setup import register_stack_dump

    register_stack_dump()
    from conch.backends.python.runtime.module_loading import set_single_model_process

    set_single_model_process()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # the log shows lines when they are printed
    if role == "complete":
        from conch.workers.host.completion_role import complete

        complete(int(descriptor))
        return
    from conch.workers.host.worker_loop import serve

    serve(int(descriptor))


if __name__ == "__main__":
    main(sys.argv[1:])
