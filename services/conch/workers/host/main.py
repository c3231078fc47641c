"""Where a worker process begins: ``python -X faulthandler main.py ROLE FD PACKAGE MODULE PATH...``.

The interpreter may be another one than the server's, in another environment. So the few packages that are
needed are found at the paths that are given here, and of the server's environment nothing else is but the
further paths, behind everything that is installed here.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from types import ModuleType


class Finder(MetaPathFinder):
    """Finds a few top-level modules at the paths it was told.

    Args:
        paths: The file of a module, or the folder of a package, by name.
    """

    def __init__(self, paths: dict[str, str]) -> None:
        self._paths = paths

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of one of the modules, or None."""
        place = self._paths.get(fullname)
        if place is None:
            return None
        if place.endswith(".py"):
            return spec_from_file_location(fullname, place)
        return spec_from_file_location(fullname, f"{place}/__init__.py", submodule_search_locations=[place])


def main(arguments: Sequence[str]) -> None:
    """Serves the socket whose descriptor is the second argument, until it is closed."""
    role, descriptor, package, module, *paths = arguments
    own = os.path.dirname(os.path.realpath(__file__))  # Python, too, follows links on the way to a script
    sys.path[:] = [path for path in sys.path if path != own]  # its modules have names that models' may have
    sys.path += [path for path in paths if path not in sys.path]
    stub = os.path.join(os.path.dirname(module), "c_python_backend_utils.py")
    found = {"conch": package, "triton_python_backend_utils": module, "c_python_backend_utils": stub}
    sys.meta_path.insert(0, Finder(found))
    from conch.workers.host.parent import end_with_parent

    end_with_parent()
    from conch.core.process_setup import register_stack_dump

    register_stack_dump()
    from conch.backends.python.runtime.module_loading import set_single_model_process

    set_single_model_process()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # what a model prints is in the log when it prints it
    if role == "complete":
        from conch.workers.host.completion_role import complete

        complete(int(descriptor))
        return
    from conch.workers.host.worker_loop import serve

    serve(int(descriptor))


if __name__ == "__main__":
    main(sys.argv[1:])
