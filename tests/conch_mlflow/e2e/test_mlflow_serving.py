"""`conch serve` with an MLflow registry."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton
from tests.support.draining import Load
from tests.support.faulty_proxy import Fault, faulty_proxy
from tests.support.loading import model_text
from tests.support.metrics import scrape, value
from tests.support.mlflow_registry import FakeRegistry, mlmodel, onnx_files, triton_files
from tests.support.onnx_graphs import ADD_SUB
from tests.support.servers import ServerProcess, client_of, eventually, started

from conch import __version__

CONFIG = b"""
backend: "python"
input { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "OUT" data_type: TYPE_FP32 dims: [ 1 ] }
parameters { key: "CONCH_PLACEMENT" value { string_value: "in_process" } }
"""

KEY = "a-key-that-is-long-enough"
POLL = ("--model-control-mode=poll", "--repository-poll-secs=0.1", "--repository-settle-secs=0.05")


def number_files(number: int) -> dict[str, bytes]:
    """The artifact of a model that answers with a number."""
    return triton_files({"1/model.py": model_text(number).encode(), "config.pbtxt": CONFIG})


@contextmanager
def serving(port: int, cache: Path, *flags: str, query: str = "") -> Iterator[ServerProcess]:
    location = f"--model-repository=mlflow+http://127.0.0.1:{port}{query}"
    common = (f"--model-cache-directory={cache}", "--grpc-port=0", "--storage-timeout-secs=20")
    with started(location, *common, *flags) as server:
        server.wait_ready()
        yield server


def answer(client: triton.InferenceServerClient, model: str = "probe") -> tuple[str, float]:
    """The version that answers, and its number."""
    given = triton.InferInput("IN", [1], "FP32")
    given.set_data_from_numpy(np.ones(1, np.float32))
    found = client.infer(model, [given])
    return found.get_response().model_version, float(found.as_numpy("OUT")[0])


def labels_of(server: ServerProcess) -> dict[str, list[str]]:
    """Labels by version, of the models together."""
    index = httpx.post(f"http://{server.http_address}/v2/repository/index").json()
    return {each["version"]: each["labels"] for each in index if "labels" in each}


@pytest.mark.slow
def test_aliases_are_moved_under_load(registry: FakeRegistry, tmp_path: Path) -> None:
    for number in (1, 2, 3):
        registry.register("probe", number_files(number))
    registry.models["probe"].aliases = {"champion": 1}
    flags = (*POLL, "--mlflow-allow-code")
    with (
        faulty_proxy(registry.port) as proxy,
        serving(proxy.port, tmp_path / "cache", *flags, query="?alias=champion") as server,
        client_of(server) as client,
    ):
        assert answer(client) == ("1", 1.0)
        load = Load(server.address, "probe", polite=False, http_address=server.http_address)
        try:
            for number in (2, 3, 1, 3, 2, 1):
                registry.models["probe"].aliases = {"champion": number}
                eventually(lambda number=number: answer(client) == (str(number), number), "swapped")  # type: ignore[misc]
            # A registry that is gone changes nothing, nor does a version that is not ready.
            proxy.fail(Fault.BUSY)
            registry.models["probe"].aliases = {"champion": 2}
            location = f"mlflow+http://127.0.0.1:{proxy.port}?alias=champion"
            family = "conch_repository_errors_total"
            eventually(lambda: value(scrape(server.metrics_url), family, repository=location), "counted")
            assert "answers 503" in server.errors
            assert answer(client) == ("1", 1.0)
            new = registry.register("probe", number_files(4), "champion", status="PENDING_REGISTRATION")
            seen = len(proxy.seen)
            proxy.heal()
            eventually(lambda: len(proxy.seen) > seen + 6, "more looks")
            assert answer(client) == ("1", 1.0)
            new.status = "READY"
            eventually(lambda: answer(client) == ("4", 4.0), "swapped")
            registry.delete("probe", 4)
            registry.models["probe"].aliases = {"champion": 2}
            eventually(lambda: answer(client) == ("2", 2.0), "swapped")
        finally:
            load.enough.set()
            load.join()
        assert load.failures == []
        assert load.completed > 100
        assert server.stop() == 0
        assert "Traceback" not in server.errors
    assert list((tmp_path / "cache" / "owners").iterdir()) == []


def test_all_aliases_are_loaded_and_code_is_refused(registry: FakeRegistry, tmp_path: Path) -> None:
    registry.register("graph", onnx_files(ADD_SUB), "champion")
    registry.register("graph", onnx_files(ADD_SUB), "challenger")
    registry.register("code", number_files(1))
    pyfunc = mlmodel({"python_function": {"loader_module": "mlflow.pyfunc.model"}})
    registry.register("pyfunc", {"MLmodel": pyfunc, "requirements.txt": b"mlflow"})
    with (
        serving(
            registry.port, tmp_path / "cache", *POLL, "--exit-on-error=false", "--strict-readiness=false"
        ) as server,
        client_of(server) as client,
    ):
        index = client.get_model_repository_index(as_json=True)["models"]
        states = {(each["name"], each.get("version", "")): each for each in index}
        assert states["graph", "1"]["state"] == states["graph", "2"]["state"] == "READY"
        for name, why in (("code", "'model.py'"), ("pyfunc", "flavor python_function")):
            (found,) = [each for (model, _), each in states.items() if model == name]
            assert found["state"] == "UNAVAILABLE" and why in found["reason"], found
            assert "--mlflow-allow-code is off" in found["reason"]
        # The other alias's version stays as it is.
        registry.register("graph", onnx_files(ADD_SUB), "challenger")
        eventually(lambda: client.is_model_ready("graph", "3"), "loaded")
        eventually(lambda: not client.is_model_ready("graph", "2"), "unloaded")
        assert client.is_model_ready("graph", "1")
        assert server.errors.count('loading: graph:1"') == 1
        # An alias can move to a version that is served already.
        assert labels_of(server) == {"1": ["champion", "stable"], "3": ["challenger"]}
        registry.models["graph"].aliases = {"champion": 3, "challenger": 1}
        eventually(lambda: labels_of(server) == {"1": ["challenger"], "3": ["champion", "stable"]}, "moved")
        assert server.stop() == 0


def traffic_of(server: ServerProcess, model: str = "probe") -> dict[str, float]:
    """Percent of the requests without a version, by the versions that get any."""
    index = httpx.post(f"http://{server.http_address}/v2/repository/index").json()
    return {
        each["version"]: each["traffic"] for each in index if each["name"] == model and each.get("traffic")
    }


@pytest.mark.slow
def test_a_challenger_is_brought_by_the_rollout_of_a_tag(registry: FakeRegistry, tmp_path: Path) -> None:
    for number in (1, 2, 3):
        registry.register("probe", number_files(number))
    model = registry.models["probe"]
    model.aliases = {"champion": 1, "best": 3}
    model.tags["conch.rollout"] = json.dumps({"rollout": {"steps": ["50% 1h"]}})
    flags = (*POLL, "--mlflow-allow-code")
    with (
        serving(registry.port, tmp_path / "cache", *flags) as server,
        client_of(server) as client,
    ):
        assert answer(client) == ("1", 1.0) and traffic_of(server) == {}
        load = Load(server.address, "probe", polite=False, http_address=server.http_address)
        try:
            model.aliases = {"champion": 1, "challenger": 2}
            eventually(lambda: traffic_of(server) == {"1": 50.0, "2": 50.0}, "the rollout has begun")
            assert labels_of(server) == {"1": ["champion", "stable"], "2": ["challenger"]}
            model.tags["conch.rollout"] = '[rollout]\nsteps = ["20% 1h"]'
            eventually(lambda: traffic_of(server) == {"1": 80.0, "2": 20.0}, "the tag is followed")
            model.aliases = {"champion": 1}
            eventually(lambda: labels_of(server) == {"1": ["champion", "stable"]}, "the challenger has left")
            model.aliases = {"champion": 3}
            eventually(lambda: answer(client) == ("3", 3.0), "moved without a rollout")
        finally:
            load.enough.set()
            load.join()
        assert load.failures == []
        model.tags["conch.rollout"] = "[rollout]\nstep = 1"
        model.aliases = {"champion": 3, "challenger": 2}
        eventually(lambda: "rollout.step: unknown field" in server.errors, "the tag is wrong")
        assert answer(client) == ("3", 3.0)
        assert server.stop() == 0
        assert "Traceback" not in server.errors


@pytest.mark.slow
def test_calls_start_rollouts_and_leave_the_labels(registry: FakeRegistry, tmp_path: Path) -> None:
    for number in (1, 2):
        registry.register("probe", number_files(number))
    registry.models["probe"].aliases = {"champion": 1, "challenger": 2}
    flags = ("--model-control-mode=explicit", "--load-model=probe", "--mlflow-allow-code")
    with serving(registry.port, tmp_path / "cache", *flags) as server, client_of(server) as client:
        assert answer(client) == ("1", 1.0)
        url = f"http://{server.http_address}/v2/repository/models/probe"
        refused = httpx.put(f"{url}/labels/champion", json={"version": 2})
        assert refused.status_code == 409 and "such as an alias in MLflow" in refused.text
        steps = {"candidate": 2, "steps": ["20% 1h"]}
        refused = httpx.post(f"{url}/rollout", json={"rollout": steps, "labels": {"x": 1}})
        assert refused.status_code == 409
        started_ = httpx.post(f"{url}/rollout", json={"rollout": steps})
        assert started_.status_code == 200, started_.text
        eventually(lambda: traffic_of(server) == {"1": 80.0, "2": 20.0}, "the rollout has begun")
        httpx.post(f"{url}/rollout/promote").raise_for_status()
        eventually(lambda: answer(client) == ("2", 2.0), "promoted")
        assert labels_of(server) == {"1": ["champion"], "2": ["challenger", "stable"]}
        httpx.delete(f"{url}/rollout").raise_for_status()
        registry.models["probe"].aliases = {"champion": 2, "best": 1}
        client.load_model("probe")
        assert labels_of(server) == {"1": ["best"], "2": ["champion", "stable"]}
        registry.models["probe"].aliases = {}
        client.load_model("probe")
        assert labels_of(server) == {}
        assert server.stop() == 0
        assert "Traceback" not in server.errors


@pytest.mark.slow
def test_models_are_run_by_the_scoring_protocol(registry: FakeRegistry, tmp_path: Path) -> None:
    tensor = {"type": "tensor", "tensor-spec": {"dtype": "float32", "shape": [-1, 2]}}
    inputs = json.dumps([{**tensor, "name": name} for name in "AB"])
    outputs = json.dumps([{**tensor, "name": "SUM"}])
    files = onnx_files(ADD_SUB)
    files["MLmodel"] = mlmodel(
        {"onnx": {"data": "model.onnx"}}, signature={"inputs": inputs, "outputs": outputs}
    )
    files["serving_input_example.json"] = b'{"inputs": {"A": [[1, 2]], "B": [[1, 2]]}}'
    registry.register("scored", files, "champion")
    registry.register("scored", files, "challenger")
    registry.register("plain", onnx_files(ADD_SUB))
    # Two versions whose sums differ, of which each gets half of the requests.
    registry.register("routed", files, "champion")
    swapped = ADD_SUB.replace(b"\x22\x03Add", b"\x22\x03Sub")
    assert swapped != ADD_SUB
    registry.register("routed", files | {"model.onnx": swapped}, "challenger")
    registry.models["routed"].tags["conch.rollout"] = json.dumps({"rollout": {"steps": ["50% 1h"]}})
    (tmp_path / "key").write_text(KEY)
    policy = tmp_path / "access.toml"
    policy.write_text('[[principal]]\nname = "web"\nkey_file = "key"\ninfer = ["*"]\n')
    flags = (f"--access-policy={policy}", "--allow-openai=false", "--log-verbose=1")
    with serving(registry.port, tmp_path / "cache", *flags) as server:
        url = f"http://{server.http_address}"
        models = f"{url}/v2/models"
        body = {"instances": [{"A": [1, 2], "B": [3, 5]}]}
        assert httpx.post(f"{models}/scored/invocations", json=body).status_code == 401
        with httpx.Client(headers={"authorization": f"Bearer {KEY}"}) as client:
            for path in ("scored", "scored/versions/1", "scored/versions/challenger"):
                found = client.post(f"{models}/{path}/invocations", json=body)
                assert (found.status_code, found.json()) == (200, {"predictions": [[4, 7]]}), found.text
            routed = {"instances": body["instances"] * 40}

            def answered() -> tuple[float, ...]:
                rows = client.post(f"{models}/routed/invocations", json=routed).json()["predictions"]
                assert len(rows) == 40
                return tuple(sorted({row[0] for row in rows}))

            # All rows of a request have one version, although they are ten batches.
            eventually(lambda: answered() == (-2,), "the challenger answers")
            assert {answered() for _ in range(30)} == {(4,), (-2,)}
            many = {"instances": body["instances"] * 9000}
            found = client.post(f"{models}/scored/invocations", json=many)
            assert found.status_code == 200, found.text[:500]
            assert found.json()["predictions"] == [[4, 7]] * 9000
            for path, given, status, reason in (
                ("scored", {"inputs": [1]}, 400, "several inputs"),
                ("plain", {"dataframe_records": [{"C": 1}]}, 400, "input 'A' of model 'plain' has dims"),
                ("missing", body, 404, "unknown model"),
                ("scored/versions/other", body, 400, "'challenger' (2)"),
            ):
                refused = client.post(f"{models}/{path}/invocations", json=given)
                assert refused.status_code == status and reason in refused.json()["error"], refused.text
            text = client.post(
                f"{models}/scored/invocations", content=b"", headers={"content-type": "text/x"}
            )
            assert text.status_code == 415
            assert client.get(f"{models}/scored/invocations").status_code == 405
            assert client.get(f"{url}/ping").status_code == 200
            assert client.get(f"{url}/version").text == __version__
            assert client.get(f"{url}/other").status_code == 404
        assert "running warmup sample 'input example'" in server.errors
        assert "failed to run warmup sample" not in server.errors
        assert server.stop() == 0
        assert "Traceback" not in server.errors


def test_the_flag_for_code_needs_a_registry(tmp_path: Path) -> None:
    with started(f"--model-repository={tmp_path}", "--mlflow-allow-code") as server:
        assert server.wait() != 0
        assert "--mlflow-allow-code has no effect" in server.errors


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")  # TorchScript
def test_programs_and_scripts_of_pytorch_are_served(registry: FakeRegistry, tmp_path: Path) -> None:
    import torch

    module, rows = torch.nn.Linear(3, 2).eval(), torch.rand(4, 3)
    expected = module(rows).detach().numpy()
    batch = torch.export.Dim("batch", min=1, max=16)
    torch.export.save(
        torch.export.export(module, (rows,), dynamic_shapes=({0: batch},)), tmp_path / "model.pt2"
    )
    torch.jit.save(torch.jit.trace(module, rows), tmp_path / "model.pth")
    signature = {
        "inputs": '[{"type": "tensor", "tensor-spec": {"dtype": "float32", "shape": [-1, 3]}}]',
        "outputs": '[{"type": "tensor", "tensor-spec": {"dtype": "float32", "shape": [-1, 2]}}]',
    }
    for name in ("model.pt2", "model.pth"):
        made = mlmodel({"pytorch": {"model_data": "data", "pytorch_version": "2.9"}}, signature=signature)
        registry.register(name, {"MLmodel": made, f"data/{name}": (tmp_path / name).read_bytes()})
    with serving(registry.port, tmp_path / "cache") as server, client_of(server) as client:
        for name in ("model.pt2", "model.pth"):
            metadata = client.get_model_metadata(name)
            given = triton.InferInput(metadata.inputs[0].name, [4, 3], "FP32")
            given.set_data_from_numpy(rows.numpy())
            found = client.infer(name, [given]).as_numpy(metadata.outputs[0].name)
            assert np.allclose(found, expected, atol=1e-6)
