#!/usr/bin/env bash
# onnxruntime 1.32.0 (with onnx 1.22.0): a model with external weights does not load through a link into the
# root of another process, though both of its files can be opened there.
#
# So Kubernetes' model containers are mounted: a link to /proc/PID/root/models of a sidecar, whose mounts the
# server's process does not have.
# Expected: what can be opened can be loaded, with external weights as without.
# Seen: the model with its weights in its own file loads and answers; the one with `weights.bin` beside it ends
# with "External data path does not exist" and the path as the other process has it: the link is resolved first,
# and what it leads to is looked for here. The same files load from a plain folder.
#
# Ends with 0 while that is so, with 1 if it has changed. Needs Python 3.11, pip, util-linux and the right to
# mount, as root or in a user namespace.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check onnx==1.22.0 onnxruntime==1.32.0
cd "$folder"
venv/bin/python - <<'PROGRAM'
import os
import subprocess
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

plain, hidden = Path("plain").absolute(), Path("hidden").absolute()
plain.mkdir()
hidden.mkdir()
tensors = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 300]) for name in ("x", "y")]
weights = numpy_helper.from_array(np.ones((300, 300), np.float32), "w")
graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", tensors[:1], tensors[1:], [weights])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
onnx.save(model, plain / "whole.onnx")
onnx.save(model, plain / "split.onnx", save_as_external_data=True, location="weights.bin")


def answer(path):
    try:
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    except Exception as error:
        return str(error).strip().splitlines()[0]
    return float(session.run(["y"], {"x": np.ones((1, 300), np.float32)})[0][0, 0])


own = ["unshare", "--mount", *(() if os.geteuid() == 0 else ("--user", "--map-root-user"))]
script = 'mount -t tmpfs none "$2" && cp "$1"/* "$2" && echo mounted && read -r _'
command = [*own, "sh", "-c", script, "sh", str(plain), str(hidden)]
with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as sidecar:
    assert sidecar.stdout.readline() == b"mounted\n", "this needs the right to mount"
    Path("link").symlink_to(f"/proc/{sidecar.pid}/root{hidden}")
    for name in ("whole.onnx", "split.onnx", "weights.bin"):
        assert Path("link", name).read_bytes() == Path("plain", name).read_bytes()
    found = {f"{place}/{name}": answer(f"{place}/{name}.onnx") for place in ("plain", "link") for name in ("whole", "split")}
    sidecar.stdin.close()
print(f"onnxruntime {onnxruntime.__version__}")
for name, value in found.items():
    print(f"{name:12} {value}")
assert found["plain/whole"] == found["plain/split"] == found["link/whole"] == 300.0, "this has changed"
assert "External data path does not exist" in str(found["link/split"]), "this has changed"
PROGRAM
