"""Entry point of workers and their template: ``main.py FD PACKAGE MODULE ADAPTERS PATH...``.

The interpreter may belong to another environment than the server's. conch's own packages are found at the
given paths, and those of add-ons that run models at the paths in ADAPTERS, which is JSON; further paths come
behind everything that is installed there. Imports that need them are late.
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from types import ModuleType


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


def main(arguments: Sequence[str]) -> None:
    """Serves forks on the socket whose descriptor is given; in a forked worker, runs its role."""
    descriptor, package, module, encoded, *paths = arguments
    adapters = json.loads(encoded)
    own = os.path.dirname(os.path.realpath(__file__))  # Python, too, follows links on the way to a script
    sys.path[:] = [path for path in sys.path if path != own]  # models may have modules of the same names
    sys.path += [path for path in paths if path not in sys.path]
    stub = os.path.join(os.path.dirname(module), "c_python_backend_utils.py")
    found = {"conch": package, "triton_python_backend_utils": module, "c_python_backend_utils": stub}
    sys.meta_path.insert(0, Finder({**adapters["packages"], **found}))
    from conch.core.process_setup import ProcessEnd, register_stack_dump

    end = ProcessEnd()
    from conch.workers.host.fork_template import TEMPLATE_END, Template, end_with_parent

    end_with_parent(TEMPLATE_END)
    from conch.backends.python.runtime.model_adapters import use_adapters

    use_adapters(adapters)
    from conch.backends.python.runtime.module_loading import set_single_model_process

    set_single_model_process()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # the log shows lines when they are printed
    request = Template(int(descriptor)).run()
    if request is not None:
        register_stack_dump()
        request.run()
    end.code = 0


if __name__ == "__main__":
    main(sys.argv[1:])
