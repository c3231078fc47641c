"""Sources of the tools whose paths open and do not resolve, as in KServe's modelcar."""

from __future__ import annotations

import filecmp
from pathlib import Path

import pytest
from tests.support.other_roots import linked_from_another_root
from tests.support.servers import copy_example

from conch_check import check_command
from conch_tools.optimize.model_kinds import find_source
from conch_tools.optimize.served_model import read_served_model
from conch_tools.tune.variants import copy_repository

FILE = "1/model.onnx"


@pytest.mark.process
def test_sources_whose_paths_do_not_resolve(tmp_path: Path) -> None:
    files, models, copy = (tmp_path / name for name in ("files", "models", "copy"))
    original = copy_example(files, "simple") / FILE
    copy_example(files, "add_sub_python")
    copy.mkdir()
    with linked_from_another_root(files, models):
        served = read_served_model(models / "simple")
        assert served is not None and served.name == "simple"
        assert filecmp.cmp(find_source(str(served.path)).path, original)
        assert check_command.run([str(models / "simple" / FILE)]) == 0
        copy_repository(models, "simple", copy)
        assert filecmp.cmp(copy / "simple" / FILE, original)
        assert (copy / "add_sub_python" / "config.pbtxt").is_file()
