"""The console's routes: what pages read, try and change."""

from __future__ import annotations

import logging
from itertools import islice
from typing import Any

import httpx
import numpy as np
import pytest
from tests.support.console import SCRIPT, Page
from tests.support.servers import LocalServer, client_of, eventually, probe, simple_inputs


def numbers(name: str, values: list[Any], datatype: str = "INT32") -> dict[str, Any]:
    return {"name": name, "shape": [1, len(values)], "datatype": datatype, "data": values}


SIMPLE = {"inputs": [numbers("INPUT0", list(range(16))), numbers("INPUT1", [1] * 16)]}


def phases(page: Page) -> dict[str, list[str]]:
    return {
        model["name"]: [version["phase"] for version in model["versions"]]
        for model in page.get("/api/models").json()["models"]
    }


def test_models_are_listed_with_their_states(page: Page) -> None:
    found = {model["name"]: model for model in page.get("/api/models").json()["models"]}
    assert set(found) == {"simple", "probe", "repeater", "broken", SCRIPT}
    assert found["simple"]["versions"][0]["phase"] == "READY" and found["simple"]["instances"] == 2
    assert found["repeater"]["decoupled"] and found["probe"]["backend"] == "python"
    assert "data_tpye" in found["broken"]["reason"]


def test_the_home_page_of_the_server_links_the_console(open_server: LocalServer) -> None:
    text = httpx.get(f"http://{open_server.http_address}/").text
    assert f'href="{open_server.console_url}"' in text


def test_one_model_has_its_tensors(page: Page) -> None:
    found = page.get("/api/models/simple").json()
    (signature,) = found["ready"].values()
    assert signature["inputs"][0] == {
        "name": "INPUT0",
        "datatype": "INT32",
        "shape": [-1, 16],
        "optional": False,
        "labels": False,
    }
    assert found["used_by"] == found["made_of"] == []
    assert page.get("/api/models/unknown").status_code == 404


def test_configs_come_with_sources_and_findings_and_without_secrets(page: Page) -> None:
    good = page.get("/api/models/probe/config").json()
    assert ["max_batch_size: 8", "config.pbtxt:3:21"] in good["lines"]
    assert not [each for each in good["findings"] if each["severity"] == "error"]
    broken = page.get("/api/models/broken/config").json()
    (finding,) = [each for each in broken["findings"] if each["line"]]
    assert (finding["line"], finding["nearest"]) == (3, "data_type")
    assert "data_tpye" in finding["message"] and finding["file"] == broken["file"]
    for text in (page.get("/api/models/probe/config").text, page.get("/api/models/probe").text):
        assert "hush" not in text
    assert "***" in str(good["lines"]) and "***" in good["text"]


def test_a_request_is_answered_with_its_outputs_and_times(page: Page) -> None:
    (name, first), (end, times) = page.infer("simple", SIMPLE)
    assert (name, end) == ("response", "end")
    assert first["outputs"][0] == {
        "name": "OUTPUT0",
        "datatype": "INT32",
        "shape": [1, 16],
        "data": list(range(1, 17)),
    }
    assert [stage for stage, _ in times["stages"]] == [
        "receive",
        "queue",
        "input",
        "infer",
        "output",
        "respond",
    ]
    assert times["batch"] == {"rows": 1, "requests": 1}
    assert sum(us for _, us in times["stages"]) == pytest.approx(times["total_us"], rel=0.01)


def test_streams_come_response_by_response(page: Page) -> None:
    events = page.infer("repeater", {"inputs": [{**numbers("IN", [3, 1, 4]), "shape": [3]}]})
    assert [name for name, _ in events] == ["response"] * 3 + ["end"]
    assert [content["outputs"][0]["data"] for _, content in events[:3]] == [[3], [1], [4]]
    assert events[0][1]["at_us"] <= events[2][1]["at_us"]


def test_requests_that_fail_say_why(page: Page) -> None:
    refused = page.post("/api/models/simple/infer", {"inputs": [numbers("INPUT0", [1])]})
    assert refused.status_code == 400 and "expected 2 inputs but got 1" in refused.json()["error"]
    assert page.post("/api/models/unknown/infer", SIMPLE).status_code == 404
    body = {"parameters": {"do": "raise"}, "inputs": [numbers("IN", [1.0], "FP32")]}
    (failed, _) = page.infer("probe", body)
    assert "told to" in failed[1]["error"]


def test_binary_tensors_and_all_that_json_can_not_say(page: Page) -> None:
    data = np.array([[1.5, np.nan, -np.inf, 2**0.5]], np.float32)
    head = b'{"inputs":[{"name":"IN","shape":[1,4],"datatype":"FP32","parameters":{"binary_data_size":16}}]}'
    length = {"inference-header-content-length": str(len(head))}
    response = page.client.post("/api/models/probe/infer", content=head + data.tobytes(), headers=length)
    assert '"data":[1.5,"nan","-inf",1.4142135' in response.text


def test_the_live_stream_tells_counts_states_details_and_lines(open_server: LocalServer, page: Page) -> None:
    with page.live("?model=probe&logs=1") as events, client_of(open_server) as client:
        name, hello = next(events)
        assert name == "hello" and hello["state"]["stage"] == "SERVING"
        names = {tuple(each[1:]): each[0] for each in hello["names"]}
        for _ in range(3):
            probe(client)
        client.infer("simple", simple_inputs())
        logging.getLogger("conch.test").warning("a line of the test")
        page.post("/api/models/simple/load")
        seen: dict[str, list[Any]] = {"tick": [], "detail": [], "logs": []}
        for name, content in islice(events, 12):
            seen[name].append(content)
            if seen["logs"] and len(seen["tick"]) >= 2:
                break
    lines = [line for tick in seen["tick"] for line in tick["m"]]
    assert {line[0] for line in lines} >= {names["probe", 1], names["simple", 1]}
    assert sum(row["ok"] for detail in seen["detail"] for row in detail["versions"]) == 3
    assert any(record["message"] == "a line of the test" for records in seen["logs"] for record in records)
    assert all(tick["rss"] > 0 and "memory" in tick for tick in seen["tick"])


def test_loads_and_unloads_are_done_and_logged(page: Page) -> None:
    assert page.post("/api/models/probe/unload", {"dependents": False}).status_code == 200
    eventually(lambda: phases(page)["probe"] == ["UNLOADED"], "probe is unloaded")
    wrong = page.post("/api/models/probe/load", {"config": '{"backend": "unknown"}'})
    assert wrong.status_code >= 400 and "unknown" in wrong.json()["error"] and not wrong.json()["findings"]
    assert page.post("/api/models/probe/load").status_code == 200
    assert phases(page)["probe"] == ["READY"]
    failed = page.post("/api/models/broken/load")
    content = failed.json()
    assert failed.status_code == 500 and content["code"] == "INTERNAL"  # as for clients of the protocol
    assert [each["nearest"] for each in content["findings"] if each["line"]] == ["data_type"]
    messages = [record["message"] for record in page.get("/api/logs").json()["records"]]
    assert any(
        message.startswith("console: local@127.0.0.1 unloads 'probe'") for message in messages
    ) and any("loads 'broken'" in message for message in messages)
    history = page.get("/api/models/probe/history").json()
    assert [event["phase"] for event in history][-1] == "READY"


def test_a_config_with_code_needs_a_user_with_credentials(page: Page) -> None:
    given = '{"backend": "onnxruntime", "parameters": {"CONCH_ENV_X": {"string_value": "1"}}}'
    answer = page.post("/api/models/simple/load", {"config": given})
    assert answer.status_code == 403
    assert "brings an environment (parameter 'CONCH_ENV_X' of its config)" in answer.json()["error"]
    assert "--console-token-file" in answer.json()["error"]


def test_an_override_is_loaded(page: Page) -> None:
    config = page.get("/api/models/simple/config").json()
    assert config["findings"] == []
    given = '{"backend": "onnxruntime", "max_batch_size": 4}'
    assert page.post("/api/models/simple/load", {"config": given}).status_code == 200
    assert page.get("/api/models/simple").json()["max_batch"] == 4
    page.post("/api/models/simple/unload")
    assert page.post("/api/models/simple/load").status_code == 200
    assert page.get("/api/models/simple").json()["max_batch"] == 8


def test_the_next_requests_are_sampled_and_then_no_more(open_server: LocalServer, page: Page) -> None:
    before = page.get("/api/settings").json()["trace"]
    assert page.post("/api/traces/sample", {"count": 2}).json() == {"": 2}
    with client_of(open_server) as client:
        for _ in range(4):
            probe(client, request_id="traced")

        # Without a look at the traces, which settles, too.
        eventually(lambda: page.get("/api/settings").json()["trace"] == before, "settings are back")
        traces = eventually(
            lambda: len(found := page.get("/api/traces").json()["traces"]) == 2 and found,
            "two traces are kept",
        )
    assert [trace["request_id"] for trace in traces] == ["traced", "traced"]
    assert {"queue", "infer"} <= {row[2] for row in traces[0]["rows"]}


def test_settings_are_shown_with_their_sources_and_changed(page: Page) -> None:
    found = page.get("/api/settings").json()
    flags = {flag["name"]: flag for flag in found["flags"]}
    assert flags["console-allow-infer"]["value"] == "true"
    assert flags["console-allow-infer"]["source"] != "default" == flags["grpc-address"]["source"]
    assert found["log_fixed"]
    changed = page.post("/api/settings/trace", {"trace_rate": ["7"]})
    assert changed.json()["trace_rate"] == ["7"]
    page.post("/api/settings/trace", {"trace_rate": []})
    wrong = page.post("/api/settings/trace", {"trace_rate": ["x"]})
    assert wrong.status_code == 400 and "trace_rate" in wrong.json()["error"]
    assert page.post("/api/settings/trace", {"trace_rate": 7}).status_code == 400


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("/api/models/simple/load", {"config": 7}),
        ("/api/models/simple/unload", {"dependents": "yes"}),
        ("/api/traces/sample", {"count": 0}),
        ("/api/traces/sample", {"count": "7"}),
        ("/api/traces/sample", [1]),
    ],
)
def test_malformed_actions_are_refused(page: Page, path: str, content: Any) -> None:
    assert page.post(path, content).status_code == 400


def test_a_body_that_is_too_large_is_refused(page: Page) -> None:
    large = {"config": "x" * (1 << 20)}
    refused = page.post("/api/models/simple/load", large)
    assert refused.status_code == 400 and "1048576 bytes" in refused.json()["error"]
