"""Loading and unloading of ensembles with the models they are made of."""

from __future__ import annotations

import json
import logging
import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.servers import eventually
from tests.support.waiting import PATIENCE_S

from conch.core.admission import Admission
from conch.core.errors import ConchError, InvalidArgumentError
from conch.core.model_control import LoadParameter
from conch.core.request import InferenceRequest, InferenceResponse
from conch.core.tensor import Tensor
from conch_control.config.json_format import to_json
from conch_control.config.parse import decode_config
from conch_control.lifecycle.ensemble_loader import EnsembleError
from conch_control.lifecycle.load_queue import SupersededError
from conch_control.repository.dependency_graph import find_cycles, run_in_order

if TYPE_CHECKING:
    from tests.support.sites import Site


def step(model: str, source: str, target: str, version: int = -1, **more: str) -> str:
    inputs = "".join(
        f'input_map {{ key: "{end}" value: "{tensor}" }} ' for end, tensor in {"X": source, **more}.items()
    )
    return (
        f'step {{ model_name: "{model}" model_version: {version} {inputs}'
        f'output_map {{ key: "X" value: "{target}" }} }}'
    )


def ensemble(*steps: str, extra: str = "", dims: str = "1") -> str:
    return f"""
        platform: "ensemble"
        input {{ name: "A" data_type: TYPE_UINT8 dims: {dims} }}
        output {{ name: "Z" data_type: TYPE_UINT8 dims: {dims} }}
        ensemble_scheduling {{ {" ".join(steps)} }}
        {extra}
    """


def chain(*models: str) -> str:
    """An ensemble of models one after the other; ensembles among them are named with a star."""
    names = ["A", *(f"t{number}" for number in range(len(models) - 1)), "Z"]
    steps = []
    for number, model in enumerate(models):
        source, target = names[number : number + 2]
        made = step(model.lstrip("*"), source, target)
        if model.startswith("*"):
            made = made.replace('"X" value', '"A" value', 1).replace('"X" value', '"Z" value')
        steps.append(made)
    return ensemble(*steps)


def send(site: Site, name: str = "e") -> bytes:
    done = threading.Event()
    got: list[InferenceResponse | None] = []

    def respond(request: InferenceRequest, response: InferenceResponse | None, final: bool) -> None:
        got.append(response)
        done.set()

    request = InferenceRequest(name, "", {"A": Tensor("A", "UINT8", (1,), b"\x07")}, respond, 0)
    site.registry.resolve(name).submit(request)
    assert done.wait(PATIENCE_S)
    assert got[0] is not None
    if got[0].error is not None:
        raise got[0].error
    return bytes(got[0].outputs[0].data)


def test_parts_are_loaded_with_an_ensemble_and_before_it(site: Site) -> None:
    for name in ("m", "n"):
        site.model(name)
    site.model("inner", config=chain("m", "n"))
    site.model("e", config=chain("*inner", "m"))
    site.agent().load("e", {})
    assert sorted(site.loads()) == ["m:1", "n:1"]
    assert site.states("e") == {1: ("READY", "")}
    assert send(site) == b"\x07"
    spec = site.serving("e")[1].spec
    assert (spec.platform, spec.backend, spec.instance_groups) == ("ensemble", "", ())


@pytest.mark.parametrize("threads", [1, 4])
def test_a_start_loads_parts_first_whatever_the_names(site: Site, threads: int) -> None:
    site.model("a", config=chain("*b", "z"))
    site.model("b", config=chain("y", "z"))
    for name in ("y", "z", "other"):
        site.model(name)
    agent = site.agent("none", load_threads=threads)
    assert agent.start() == []
    assert agent.ready()
    assert send(site, "a") == b"\x07"


def test_startup_models_bring_their_parts(site: Site) -> None:
    site.model("e", config=chain("m"))
    site.model("m")
    site.model("not asked for")
    assert site.agent(startup_models=("e",)).start() == []
    assert site.loads() == ["m:1"]


def test_independent_parts_load_side_by_side(site: Site) -> None:
    for name in ("m", "n"):
        site.model(name, {1: "slowly"})
    site.model("e", config=chain("m", "n"))
    thread = threading.Thread(target=site.agent().load, args=("e", {}))
    thread.start()
    for _ in range(2):
        assert site.backend.loading.acquire(timeout=PATIENCE_S), "one waits for the other"
    site.backend.gate.set()
    thread.join()
    assert site.states("e") == {1: ("READY", "")}


BAD = {
    "missing": (
        chain("nothere", "m", "nor this"),
        "ensemble e contains models that are not available or ambiguous: nothere, nor this",
    ),
    "fails": (
        chain("bad"),
        "ensemble 'e' depends on 'bad' which has no loaded version. Model 'bad' loading failed with error: "
        "version 1 is at UNAVAILABLE state: Unavailable: no luck;",
    ),
    "nested": (
        chain("*badly"),
        "ensemble 'e' depends on 'badly' which is not valid. Model 'badly' failed with error: ensemble "
        "'badly' depends on 'bad' which has no loaded version. Model 'bad' loading failed with error: "
        "version 1 is at UNAVAILABLE state: Unavailable: no luck;",
    ),
    "no version": (
        chain("empty"),
        "ensemble 'e' depends on 'empty' which has no loaded version. Model 'empty' loading failed with "
        "error: at least one version must be available under the version policy of model 'empty'",
    ),
    "version": (
        ensemble(step("m", "A", "Z", 2)),
        "ensemble 'e' depends on 'm' whose required version 2 is not loaded.",
    ),
    "itself": (chain("*e"), "circular dependency between ensembles: e -> ... -> e -> e"),
    "circle": (chain("*back"), "circular dependency between ensembles: e -> ... -> back -> e"),
    "batch": (
        ensemble(step("m2", "A", "Z"), extra="max_batch_size: 3"),
        "ensemble e allows maximum batch size 3, but it contains model m2 which only allows maximum batch "
        "size to be 2",
    ),
    "type": (
        ensemble(step("m", "A", "t"), step("wide", "t", "Z")),
        "in ensemble e, ensemble tensor t: inconsistent data type: TYPE_UINT8 is inferred from model m while "
        "TYPE_STRING is inferred from model wide",
    ),
    "shape": (
        ensemble(step("m", "A", "Z"), dims="[ 1, 2 ]"),
        "in ensemble e, ensemble tensor A: inconsistent shape: [1,2] is inferred from model e while [1] is "
        "inferred from model m",
    ),
    "input": (
        ensemble(step("m", "A", "Z", Y="A")),
        "in ensemble e, ensemble tensor A is mapping to non-existing input Y in model m",
    ),
    "output": (
        ensemble(step("m", "A", "Z").replace('output_map { key: "X"', 'output_map { key: "Y"')),
        "in ensemble e, ensemble tensor Z is mapped from non-existing output Y in model m",
    ),
    "queue": (
        ensemble(
            step("m", "A", "Z"),
            extra='parameters { key: "CONCH_MAX_QUEUE_SIZE" value { string_value: "3" } }',
        ),
        "a maximum queue size can not be specified for ensemble 'e': its models have the queues",
    ),
    "unmapped": (
        ensemble(step("two", "A", "Z")),
        "in ensemble e, input Y in model two is not mapped to any ensemble tensors",
    ),
    "decoupled": (
        ensemble(step("many", "A", "t"), step("two", "t", "Z", Y="A")),
        "in ensemble e, step of model 'e' receives inputs originated from different decoupled models",
    ),
    "decoupled inside": (
        ensemble(step("many", "A", "t"), step("two", "t", "u", Y="A"), step("m", "u", "Z")),
        "in ensemble e, step of model 'two' receives inputs originated from different decoupled models",
    ),
}


def test_a_name_that_is_not_unique_is_a_load_that_failed(site: Site, tmp_path: Path) -> None:
    repositories = site.repository, tmp_path / "other"
    for repository in repositories:
        site.model("m", repository=repository)
    agent = site.agent(repositories=repositories)
    with pytest.raises(ConchError, match="failed to poll from model repository"):
        agent.load("m", {})
    with pytest.raises(ConchError):
        agent.load("nowhere", {})
    assert agent.loads.snapshot().failures == {"m": 1}


@pytest.mark.parametrize("name", BAD)
def test_ensembles_that_do_not_fit_their_models(site: Site, name: str) -> None:
    config, text = BAD[name]
    site.model("m")
    site.model("bad", {1: "unavailable no luck"})
    site.model("badly", config=chain("bad"))
    site.model("empty", {})
    site.model("back", config=chain("*e"))
    site.model("m2", config=site.config("max_batch_size: 2"))
    site.model("wide", config=site.config().replace("TYPE_UINT8", "TYPE_STRING"))
    more = 'input { name: "Y" data_type: TYPE_UINT8 dims: 1 }'
    site.model("two", config=site.config(more))
    site.model("many", config=site.config("model_transaction_policy { decoupled: true }"))
    site.model("e", config=config)
    agent = site.agent()
    with pytest.raises(EnsembleError) as raised:
        agent.load("e", {})
    assert raised.value.message == f"load failed for model 'e': {text}\n"
    assert raised.value.reason == text
    assert agent.loads.snapshot().failures["e"] == 1, "it is tried once, and counted"
    (line,) = [line for line in agent.index(False) if line.name == "e"]
    assert (line.state, line.reason) == ("UNAVAILABLE", text)


OWN = {
    "unmapped": (
        ensemble(step("m", "A", "Z").replace('output_map { key: "X" value: "Z" }', "")),
        "must specify 'output_map' in step 0 of ensemble 'e'",
    ),
    "platform": (
        chain("nothere", "m").replace('"ensemble"', '"onnxruntime_onnx"'),
        "ensemble scheduling cannot be set for model 'e' whose platform is not ensemble",
    ),
    "batch": (
        ensemble(step("nothere", "A", "Z"), extra="max_batch_size: -1"),
        "'max_batch_size' must be non-negative value for e",
    ),
}


@pytest.mark.parametrize("name", OWN)
def test_mistakes_of_the_config_itself_come_before_those_of_its_models(site: Site, name: str) -> None:
    config, text = OWN[name]
    site.model("m")
    site.model("e", config=config)
    agent = site.agent()
    with pytest.raises(ConchError, match="failed to poll from model repository"):
        agent.load("e", {})
    (line,) = [line for line in agent.index(False) if line.name == "e"]
    assert (line.state, line.reason) == ("UNAVAILABLE", text)
    assert site.loads() == []


def test_optional_inputs_need_no_tensor(site: Site) -> None:
    more = 'input { name: "Y" data_type: TYPE_UINT8 dims: 1 optional: true }'
    site.model("two", config=site.config(more))
    site.model("e", config=ensemble(step("two", "A", "Z")))
    site.agent().load("e", {})
    assert send(site) == b"\x07"


def test_whether_it_is_decoupled_follows_from_its_models(site: Site) -> None:
    site.model("m")
    site.model("many", config=site.config("model_transaction_policy { decoupled: true }"))
    policy = "model_transaction_policy { decoupled: %s }"
    site.model("e", config=ensemble(step("m", "A", "Z"), extra=policy % "true"))
    site.model("f", config=ensemble(step("many", "A", "Z"), extra=policy % "false"))
    agent = site.agent()
    for name, decoupled in (("e", False), ("f", True)):
        agent.load(name, {})
        spec = site.serving(name)[1].spec
        assert spec.decoupled is decoupled
        assert spec.config["model_transaction_policy"] == {"decoupled": decoupled}
        assert spec.config["instance_group"] == []
        assert "optimization" not in spec.config


def test_labels_come_from_the_model_that_makes_an_output_and_follow_it(site: Site) -> None:
    labelled = site.config().replace("output {", 'output { label_filename: "l.txt"')
    directory = site.model("m", config=labelled)
    (directory / "l.txt").write_text("a\nb\n")
    site.model("n")
    site.model("inner", config=chain("n", "m"))
    site.model("e", config=chain("*inner"))
    site.model("f", config=chain("m", "n"))
    agent = site.agent()
    for name in ("e", "f"):
        agent.load(name, {})
    assert site.serving("e")[1].spec.outputs[0].labels == ("a", "b")
    assert site.serving("f")[1].spec.outputs[0].labels == ()
    (directory / "l.txt").write_text("c\n")
    agent.load("m", {})
    assert site.serving("e")[1].spec.outputs[0].labels == ("c",)
    assert site.serving("inner")[1].spec.outputs[0].labels == ("c",)


def test_loading_an_ensemble_again_reloads_what_has_changed(site: Site) -> None:
    site.model("m")
    site.model("n")
    site.model("e", config=chain("m", "n"))
    agent = site.agent()
    agent.load("e", {})
    first = site.serving("e")
    agent.load("e", {})
    assert sorted(site.loads()) == ["m:1", "n:1"]
    assert site.serving("e") == first
    site.model("m", {1: "changed"})
    agent.load("e", {})
    assert sorted(site.loads()) == ["m:1", "m:1", "n:1"]
    assert site.serving("e") != first, "checked against the new one"


def test_the_log_tells_the_limit_of_requests(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    site.model("m")
    site.model("free", config=ensemble(step("m", "A", "Z")))
    site.model("e", config=ensemble(step("m", "A", "Z"), "max_inflight_requests: 3"))
    with caplog.at_level(logging.INFO):
        agent = site.agent()
        agent.load("free", {})
        agent.load("e", {})
    told = [text for text in caplog.messages if "max_inflight_requests" in text]
    assert told == ["Ensemble model 'e' configured with max_inflight_requests: 3"]


def test_a_part_that_changes_so_that_it_fits_no_more(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    site.model("m")
    site.model("e", config=chain("m"))
    agent = site.agent()
    agent.load("e", {})
    site.model("m", config=site.config().replace("TYPE_UINT8", "TYPE_STRING"))
    with caplog.at_level(logging.ERROR):
        agent.load("m", {})
    assert "goes on as it was" in caplog.text
    with pytest.raises(InvalidArgumentError, match=r"in ensemble 'e', .* model 'm' expects 'BYTES'"):
        send(site)


def test_a_part_whose_reload_fails_goes_on_serving(site: Site) -> None:
    site.model("m")
    site.model("e", config=chain("m"))
    agent = site.agent()
    agent.load("e", {})
    site.model("m", {1: "unavailable no luck"})
    with pytest.raises(ConchError):
        agent.load("m", {})
    agent.load("e", {})
    assert send(site) == b"\x07"


def test_unloading_a_part_takes_its_ensembles_along_until_it_is_back(site: Site) -> None:
    site.model("m")
    site.model("n")
    site.model("inner", config=chain("m"))
    site.model("e", config=chain("*inner", "n"))
    agent = site.agent()
    agent.load("e", {})
    agent.unload("m", False)
    for name in ("m", "inner", "e"):
        assert site.serving(name) == {}
    assert site.serving("n") != {}
    agent.load("m", {})
    assert send(site) == b"\x07"


def submitted(site: Site) -> queue.SimpleQueue[InferenceResponse | None]:
    """Sends a request to ensemble ``e``; its responses come into the queue."""
    got: queue.SimpleQueue[InferenceResponse | None] = queue.SimpleQueue()
    request = InferenceRequest(
        "e",
        "",
        {"A": Tensor("A", "UINT8", (1,), b"\x07")},
        lambda _, response, final: got.put(response),
        0,
    )
    site.registry.resolve("e").submit(request)
    return got


@pytest.mark.parametrize("with_reload", [False, True])
def test_unloading_a_part_lets_its_ensembles_finish(site: Site, with_reload: bool) -> None:
    """Also the requests that an ensemble took before it was loaded anew."""
    site.model("slow", {1: "slow"})
    site.model("m")
    site.model("inner", config=chain("m"))
    site.model("e", config=chain("slow", "*inner", "m"))
    agent = site.agent()
    agent.load("e", {})
    got = submitted(site)
    if with_reload:
        site.model("e", config=chain("slow", "*inner", "m") + "\n")
        agent.load("e", {})
    agent.unload("m", False)
    for name in ("m", "inner", "e"):
        assert site.serving(name) == {}, "for everybody else"
    with pytest.raises(ConchError):
        Admission(site.registry).admit(InferenceRequest("m", "", {}, lambda *_: None, 0))
    assert site.states("m") == {1: ("UNLOADING", "")}
    assert site.backend.closed == []
    site.backend.gate.set()
    response = got.get(timeout=PATIENCE_S)
    assert response is not None and response.error is None
    eventually(lambda: site.states("m") == {1: ("UNAVAILABLE", "unloaded")}, "nobody needs it any more")
    assert site.backend.closed == ["m:1"]
    assert not site.registry.draining


def test_a_part_that_is_unloaded_and_comes_back_at_once(site: Site) -> None:
    site.model("slow", {1: "slow"})
    site.model("m")
    site.model("e", config=chain("slow", "m"))
    agent = site.agent()
    agent.load("e", {})
    got = submitted(site)
    agent.unload("m", False)
    agent.load("m", {})
    assert site.serving("m") != {}
    assert site.serving("e") != {}
    site.backend.gate.set()
    response = got.get(timeout=PATIENCE_S)
    assert response is not None and response.error is None
    eventually(lambda: site.backend.closed == ["m:1"], "the first one goes")
    assert site.serving("m") != {}
    assert send(site) == b"\x07"


def test_an_ensemble_unloaded_on_purpose_does_not_come_back(site: Site) -> None:
    site.model("m")
    site.model("e", config=chain("m"))
    agent = site.agent()
    agent.load("e", {})
    agent.unload("m", False)
    agent.unload("e", False)
    agent.load("m", {})
    assert site.serving("e") == {}


def test_an_ensemble_that_is_unloaded_while_its_parts_load(site: Site) -> None:
    site.model("m", {1: "slowly"})
    site.model("e", config=chain("m"))
    agent = site.agent()
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(agent.load, "e", {})
        assert site.backend.loading.acquire(timeout=PATIENCE_S)
        agent.unload("e", False)
        site.backend.gate.set()
        with pytest.raises(SupersededError):
            loading.result(PATIENCE_S)
    assert site.serving("m") != {}
    assert "e" not in site.registry.entries
    agent.load("e", {})
    assert send(site) == b"\x07"


def unload_all(site: Site, agent: Any, name: str) -> None:
    """Unloads with dependents, and waits until it is done."""
    agent.unload(name, True)
    eventually(
        lambda: not any(thread.name.startswith("conch-unload") for thread in threading.enumerate()),
        "everything is unloaded",
    )


def test_parts_loaded_for_an_ensemble_only_go_with_it(site: Site) -> None:
    for name in ("m", "n", "o"):
        site.model(name)
    site.model("inner", config=chain("m", "n"))
    site.model("e", config=chain("*inner", "o"))
    site.model("f", config=chain("n"))
    agent = site.agent()
    agent.load("o", {})
    agent.load("e", {})
    agent.load("f", {})
    unload_all(site, agent, "e")
    assert [site.serving(name) == {} for name in ("e", "inner", "m")] == [True] * 3
    assert site.serving("n") != {}, "another ensemble needs it"
    assert site.serving("o") != {}, "it was asked for by itself"
    unload_all(site, agent, "f")
    assert site.serving("n") == {}


def test_without_dependents_parts_stay(site: Site) -> None:
    site.model("m")
    site.model("e", config=chain("m"))
    agent = site.agent()
    agent.load("e", {})
    agent.unload("e", False)
    assert site.serving("m") != {}


def test_an_override_may_make_an_ensemble_and_is_kept_when_a_part_changes(site: Site) -> None:
    site.model("m")
    site.model("e")
    agent = site.agent()
    tensor = {"name": "A", "data_type": "TYPE_UINT8", "dims": [1]}
    config = {
        "platform": "ensemble",
        "input": [tensor],
        "output": [{**tensor, "name": "Z"}],
        "ensemble_scheduling": {
            "step": [
                {
                    "model_name": "m",
                    "model_version": -1,
                    "input_map": {"X": "A"},
                    "output_map": {"X": "Z"},
                }
            ]
        },
    }
    agent.load("e", {"config": json.dumps(config)})
    assert site.serving("e")[1].spec.ensemble is not None
    site.model("m", {1: "changed"})
    agent.load("m", {})
    assert site.serving("e")[1].spec.ensemble is not None
    assert send(site) == b"\x07"


def test_a_circle_with_what_an_override_made_is_found(site: Site) -> None:
    site.model("m")
    site.model("inner", config=chain("m"))
    site.model("e", config=chain("*inner"))
    agent = site.agent()
    agent.load("e", {})
    tensor = {"name": "A", "data_type": "TYPE_UINT8", "dims": [1]}
    part = {"model_name": "e", "model_version": -1, "input_map": {"A": "A"}, "output_map": {"Z": "Z"}}
    config = {
        "platform": "ensemble",
        "input": [tensor],
        "output": [{**tensor, "name": "Z"}],
        "ensemble_scheduling": {"step": [part]},
    }
    with pytest.raises(EnsembleError, match="circular dependency"):
        agent.load("inner", {"config": json.dumps(config)})
    assert send(site) == b"\x07"


def test_a_stop_finishes_requests_through_all_steps(site: Site) -> None:
    site.model("a", {1: "slow"})
    site.model("b")
    site.model("e", config=chain("a", "b"))
    agent = site.agent()
    agent.load("e", {})
    got: list[InferenceResponse | None] = []
    request = InferenceRequest(
        "e",
        "",
        {"A": Tensor("A", "UINT8", (1,), b"\x07")},
        lambda _, response, final: got.append(response),
        0,
    )
    site.registry.resolve("e").submit(request)
    timer = threading.Timer(0.1, site.backend.gate.set)
    timer.start()
    assert agent.close(PATIENCE_S)
    timer.join()
    assert got[0] is not None
    assert got[0].error is None


def test_an_ensemble_needs_a_version_directory(site: Site) -> None:
    site.model("m")
    site.model("e", {}, config=chain("m"))
    with pytest.raises(ConchError, match="at least one version must be available"):
        site.agent().load("e", {})


def test_circles_are_found_and_nothing_else() -> None:
    graph = {"a": ("b", "c"), "b": ("c",), "c": (), "d": ("e", "c"), "e": ("f",), "f": ("e",), "g": ("g",)}
    assert find_cycles(graph) == {"e": "f", "f": "e", "g": "g"}


def test_running_in_order_goes_on_after_failures() -> None:
    order: list[str] = []
    lock = threading.Lock()

    def run(name: str, failures: Any) -> None:
        with lock:
            order.append(name)
        if name == "b" or "b" in failures:
            raise ValueError(name)

    graph = {"a": ("b", "c"), "b": (), "c": (), "d": ("c",)}
    failures = run_in_order(graph, run, 2)
    assert set(failures) >= {"a", "b"}
    assert sorted(order) == ["a", "b", "c", "d"]
    assert order.index("a") > max(order.index("b"), order.index("c"))
    assert order.index("d") > order.index("c")


def test_an_ensemble_that_was_asked_for_comes_with_the_part_it_lacked(site: Site) -> None:
    site.model("e", config=chain("m"))
    agent = site.agent()
    with pytest.raises(ConchError, match="contains models that are not available or ambiguous: m"):
        agent.load("e", {})
    site.model("m")
    agent.load("m", {})
    assert site.states("e") == {1: ("READY", "")}
    assert agent.ready()


def test_an_ensemble_that_was_given_up_does_not_come(site: Site) -> None:
    site.model("e", config=chain("m"))
    agent = site.agent()
    with pytest.raises(ConchError):
        agent.load("e", {})
    agent.unload("e", False)
    site.model("m")
    agent.load("m", {})
    assert "e" not in site.registry.entries


def test_an_ensemble_comes_back_with_the_config_that_it_had(site: Site) -> None:
    site.model("m")
    site.model("n")
    site.model("e", config=chain("m"))
    agent = site.agent()
    override = json.dumps(to_json(decode_config(chain("n").encode(), "e")))
    agent.load("e", {"config": override})
    agent.load("e", {})
    agent.unload("n", False)
    agent.load("n", {})

    def steps() -> list[str]:
        spec = site.serving("e")[1].spec
        assert spec.ensemble is not None
        return [step.model_name for step in spec.ensemble.steps]

    assert steps() == ["n"]
    agent.unload("e", False)
    agent.load("e", {})
    agent.unload("m", False)
    agent.load("m", {})
    assert steps() == ["m"]


def test_an_ensemble_of_a_model_whose_files_were_given(site: Site) -> None:
    site.model("m")
    site.model("e", config=chain("m", "x"))
    agent = site.agent()
    config = json.dumps(to_json(decode_config(site.config().encode(), "x")))
    given: dict[str, LoadParameter] = {"config": config, "file:3/model.echo": b"ok"}
    agent.load("x", given)
    agent.load("e", {})
    assert site.states("e") == {1: ("READY", "")}
    agent.unload("x", False)
    agent.load("x", given)
    assert site.states("e") == {1: ("READY", "")}
    agent.load("m", given)
    assert list(site.serving("m")) == [3]
    assert site.states("e") == {1: ("READY", "")}
