"""Rows by every way in, compared with the library's own prediction of the same frame."""

from __future__ import annotations

import gc
import io
import json
import logging
import re
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.frame_models import boosted, lightgbm_frames, people, pipeline, xgboost_frames
from tests.support.servers import serving

import conch
from conch.core.spec import ModelSpec
from conch_frames.interface import FrameInterface, interface_of
from conch_frames.invocations import invocation_routes

ARROW = "application/vnd.apache.arrow.stream"
PARQUET = "application/vnd.apache.parquet"
FLAGS = ("--frame-max-unpacked-size=4000000",)
FAILING = """
backend: "python" max_batch_size: 1
input { name: "x" data_type: TYPE_FP64 dims: [ 1 ] }
output { name: "y" data_type: TYPE_FP64 dims: [ 1 ] }
"""
FAILING_MODEL = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        error = pb_utils.TritonError("no such row", pb_utils.TritonError.INVALID_ARG)
        return [pb_utils.InferenceResponse(error=error) for _ in requests]
"""
BATCHED = 'backend: "sklearn" max_batch_size: 3'


@pytest.fixture(scope="module")
def churn() -> Any:
    return pipeline()


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("frames")
    for name in ("churn", "batched", "light", "extreme", "failing"):
        (root / name / "1").mkdir(parents=True)
    pipeline(root / "churn/1/model.skops")
    pipeline(root / "batched/1/model.skops")
    (root / "batched/config.pbtxt").write_text(BATCHED)
    (root / "failing/1/model.py").write_text(FAILING_MODEL)
    (root / "failing/config.pbtxt").write_text(FAILING)
    lightgbm_frames(root / "light/1/lightgbm.txt")
    xgboost_frames(root / "extreme/1/model.ubj")
    return root


@pytest.fixture(scope="module")
def models(repository: Path) -> Iterator[httpx.Client]:
    with (
        serving(repository, flags=FLAGS) as server,
        httpx.Client(base_url=f"http://{server.http_address}/v2/models", timeout=None) as client,
    ):
        yield client


def post(
    client: httpx.Client, model: str, body: Any, kind: str = "application/json", accept: str = ""
) -> Any:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": kind, "accept": accept or "*/*"}
    return client.post(f"/{model}/invocations", content=content, headers=headers)


def plain(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows of Python's own values, with None for nulls."""
    rows = frame.astype(object).where(frame.notna(), None).to_dict("records")
    return [{str(name): value for name, value in row.items()} for row in rows]


def records(frame: pd.DataFrame) -> tuple[Any, str]:
    return {"dataframe_records": plain(frame)}, "application/json"


def split(frame: pd.DataFrame) -> tuple[Any, str]:
    data = [list(row.values()) for row in plain(frame)]
    return {"dataframe_split": {"columns": list(frame), "data": data}}, "application/json"


def inputs(frame: pd.DataFrame) -> tuple[Any, str]:
    rows = plain(frame)
    return {"inputs": {name: [row[name] for row in rows] for name in frame}}, "application/json"


def instances(frame: pd.DataFrame) -> tuple[Any, str]:
    return {"instances": plain(frame)}, "application/json"


def lines(frame: pd.DataFrame) -> tuple[Any, str]:
    return "\n".join(map(json.dumps, plain(frame))).encode(), "application/x-ndjson"


def as_csv(frame: pd.DataFrame) -> tuple[Any, str]:
    return pl.from_pandas(frame).write_csv().encode(), "text/csv"


def arrow(frame: pd.DataFrame) -> tuple[Any, str]:
    table, sink = pa.Table.from_pandas(frame, preserve_index=True), io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue(), ARROW


def compressed(frame: pd.DataFrame) -> tuple[Any, str]:
    sink = io.BytesIO()
    pl.from_pandas(frame).write_ipc_stream(sink, compression="zstd")
    return sink.getvalue(), ARROW


def arrow_file(frame: pd.DataFrame) -> tuple[Any, str]:
    sink = io.BytesIO()
    frame.to_feather(sink)
    return sink.getvalue(), ARROW


def polars_file(frame: pd.DataFrame) -> tuple[Any, str]:
    sink = io.BytesIO()
    pl.from_pandas(frame).write_ipc(sink, compression="lz4")
    return sink.getvalue(), ARROW


def parquet(frame: pd.DataFrame) -> tuple[Any, str]:
    sink = io.BytesIO()
    frame.to_parquet(sink)
    return sink.getvalue(), PARQUET


def polars_parquet(frame: pd.DataFrame) -> tuple[Any, str]:
    sink = io.BytesIO()
    pl.from_pandas(frame).write_parquet(sink)
    return sink.getvalue(), PARQUET


WAYS: tuple[Callable[[pd.DataFrame], tuple[Any, str]], ...] = (
    records, split, inputs, instances, lines, as_csv, arrow, compressed, arrow_file, polars_file, parquet,
    polars_parquet,
)  # fmt: skip

ROW = st.fixed_dictionaries(
    {
        "age": st.integers(0, 120) | st.sampled_from([2**53, 2**53 + 1, -(2**60)]),
        "income": st.none() | st.floats(-1e9, 1e9),
        "town": st.none() | st.sampled_from(["Ulm", "Köln", "", 'Au "am", See', "NA", "null", "007", "\n"]),
        "plan": st.sampled_from(["basic", "pro"] * 8 + ["Pro"]),
        "level": st.sampled_from([1, 2, 3] * 5 + [4]),
        "active": st.booleans(),
    }
)


def refused(row: dict[str, Any]) -> set[str]:
    """Columns of a row that the model can't take."""
    tests = {"age": abs(row["age"]) > 2**53, "plan": row["plan"] == "Pro", "level": row["level"] == 4}
    return {name for name, is_refused in tests.items() if is_refused}


@given(st.lists(ROW, min_size=1, max_size=5), st.permutations(list(people())))
def test_rows_by_every_way_are_predicted_as_by_the_pipeline(
    models: httpx.Client, churn: Any, rows: list[dict[str, Any]], order: list[str]
) -> None:
    types = {"income": float, "town": "str", "plan": "category"}
    frame = pd.DataFrame(rows).astype(types)
    bad = {(name, number) for number, row in enumerate(rows) for name in refused(row)}
    sent = frame[order].assign(other=1)
    for way in WAYS:
        answer = post(models, "churn", *way(sent))
        if bad:
            place = re.match(r"column '(\w+)', row (\d+): ", answer.json()["error"])
            assert answer.status_code == 400 and place is not None, (way, answer.text)
            assert (place[1], int(place[2])) in bad, (way, answer.text)
            continue
        assert answer.status_code == 200, (way, answer.text)
        found = answer.json()["predictions"]
        assert [row["predict"] for row in found] == churn.predict(frame).tolist(), way
        assert [row["predict_proba"] for row in found] == churn.predict_proba(frame).tolist(), way


@pytest.mark.parametrize("model", ["light", "extreme"])
def test_a_booster_gets_its_columns_by_name_and_its_categories(
    models: httpx.Client, repository: Path, model: str, tmp_path: Path
) -> None:
    frame = boosted()[:20]
    if model == "light":
        expected = lightgbm_frames(tmp_path / "lightgbm.txt").predict(frame)
    else:
        import xgboost

        booster = xgboost_frames(tmp_path / "model.json")
        expected = booster.predict(xgboost.DMatrix(frame, enable_categorical=True))
    sent = frame[["level", "plan", "annual income", "age"]].astype({"level": int})
    for way in WAYS:
        answer = post(models, model, *way(sent))
        assert answer.status_code == 200, (way, answer.text)
        probabilities = [row["predict_proba"][1] for row in answer.json()["predictions"]]
        assert np.array_equal(np.array(probabilities, expected.dtype), expected), way
        for name, value, known in (("plan", "gold", "'basic', 'pro'"), ("level", 40, "10, 20, 30")):
            strange = sent.assign(**{name: value})
            text = post(models, model, *way(strange)).json()["error"]
            assert f"column '{name}', row 0: {value!r} is no category of the model: {known}" in text
        text = post(models, model, *way(sent.drop(columns="age"))).json()["error"]
        assert text.startswith("column 'age': model '" + model + "' needs it, and the table has "), text


def test_rows_beyond_a_batch_are_several_and_come_back_in_order(models: httpx.Client, churn: Any) -> None:
    frame = people()[:50]
    answer = post(models, "batched", *arrow(frame))
    found = [row["predict_proba"] for row in answer.json()["predictions"]]
    # The last bit depends on the number of rows in an execution.
    np.testing.assert_allclose(found, churn.predict_proba(frame), rtol=1e-12)


def test_the_files_of_a_model_are_read_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = list[str]()

    def interface_of_files(spec: ModelSpec) -> FrameInterface:
        threads.append(threading.current_thread().name)
        return interface_of(spec)

    monkeypatch.setattr(invocation_routes, "interface_of", interface_of_files)
    server = conch.Server(grpc_port=None, http_port=0, metrics_port=None)
    server.bind("double", conch.batch(lambda x: 2 * x), example={"x": np.ones((1, 1))})
    with server:
        for _ in range(2):
            url = f"{server.http_url}/v2/models/double/invocations"
            answer = httpx.post(url, json={"dataframe_records": [{"x": 1.5}]}, timeout=None)
            assert answer.json() == {"predictions": [3.0]}, answer.text
    assert [name.startswith("conch-http-parse") for name in threads] == [True]


@pytest.mark.parametrize("row", [b"1\n", b"1.000000000\n"])
def test_the_first_of_many_requests_that_fails_is_the_answer(models: httpx.Client, row: bytes) -> None:
    answer = post(models, "failing", b"x\n" + row * 16_000, "text/csv")
    assert (answer.status_code, answer.json()) == (400, {"error": "no such row"})


def test_a_client_that_leaves_while_its_rows_are_read_leaves_no_error(
    repository: Path, caplog: pytest.LogCaptureFixture
) -> None:
    body = b'x,"y"\n' + b"1,2\n" * 1_000_000
    head = (
        f"POST /v2/models/churn/invocations HTTP/1.1\r\nhost: localhost\r\ncontent-type: text/csv\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    with serving(repository) as server:
        host, _, port = server.http_address.rpartition(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(head.encode() + body)
    gc.collect()
    assert not [each for each in caplog.records if each.levelno >= logging.ERROR]


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        ("text/csv", "text/csv"),
        ("text/*;q=0.9, application/json;q=0.1", "text/csv"),
        (ARROW, ARROW),
        ("", "application/json"),
        ("text/html, */*;q=0.1", "application/json"),
        ("application/json;q=0.1, application/*", ARROW),
    ],
)
def test_predictions_come_in_the_format_that_is_accepted(
    models: httpx.Client, churn: Any, accept: str, kind: str
) -> None:
    frame = people()[:9]
    answer = post(models, "churn", *parquet(frame), accept=accept)
    assert (answer.status_code, answer.headers["content-type"]) == (200, kind), answer.text
    labels, probabilities = churn.predict(frame), churn.predict_proba(frame)
    if kind == "application/json":
        found = pd.DataFrame(answer.json()["predictions"])
        assert found["predict"].tolist() == labels.tolist()
        return
    if kind == "text/csv":
        found = pd.read_csv(io.BytesIO(answer.content))
    else:
        found = pa.ipc.open_stream(answer.content).read_all().to_pandas()
    assert list(found) == ["predict", "predict_proba_0", "predict_proba_1"]
    assert found["predict"].tolist() == labels.tolist()
    assert np.array_equal(found[["predict_proba_0", "predict_proba_1"]].to_numpy(), probabilities)


def bomb() -> bytes:
    """A Parquet file of some kilobytes that is a gigabyte of text."""
    sink = io.BytesIO()
    text = pa.array(["x" * 10_000])
    codes = pa.array(np.zeros(100_000, np.int32))
    pq.write_table(pa.table({"town": pa.DictionaryArray.from_arrays(codes, text)}), sink)
    return sink.getvalue()


def zeros() -> bytes:
    """A compressed stream of some kilobytes that is eight megabytes of numbers."""
    table, sink = pa.table({"age": np.zeros(1_000_000)}), io.BytesIO()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_stream(sink, table.schema, options=options) as writer:
        writer.write_table(table)
    return sink.getvalue()


def zeros_file() -> bytes:
    """Such numbers in a file."""
    sink = io.BytesIO()
    pl.DataFrame({"age": np.zeros(1_000_000)}).write_ipc(sink, compression="zstd")
    return sink.getvalue()


def damaged() -> bytes:
    """A Parquet file without a part of its footer."""
    sink = io.BytesIO()
    pq.write_table(pa.table({"age": [1, None]}), sink)
    return sink.getvalue()[:-60] + sink.getvalue()[-30:]


@pytest.mark.parametrize(
    ("body", "kind", "status", "text"),
    [
        (bomb(), PARQUET, 413, "unpacks to more than 4000000 bytes"),
        (zeros(), ARROW, 413, "unpacks to more than 4000000 bytes"),
        (b"PAR1", PARQUET, 400, "the body is not Parquet"),
        (damaged(), PARQUET, 400, "the body is not Parquet"),
        (b"ARROW1", ARROW, 400, "the body is no Arrow stream that can be read: the file has no footer"),
        (b"ARROW1" + bytes(30) + b"ARROW1", ARROW, 400, "the file has no footer"),
        (zeros_file(), ARROW, 413, "unpacks to more than 4000000 bytes"),
        (b'{"age": 1}\n{', "application/jsonl", 400, "the table, row 1: the line is not JSON"),
        (b"", "image/png", 415, "Content-Type is 'image/png'"),
    ],
)
def test_a_body_that_can_not_be_read(
    models: httpx.Client, body: bytes, kind: str, status: int, text: str
) -> None:
    answer = post(models, "churn", body, kind)
    assert (answer.status_code, text in answer.json()["error"]) == (status, True), answer.text


def test_a_format_that_is_not_known_is_not_accepted(models: httpx.Client) -> None:
    answer = post(models, "churn", *records(people()[:1]), accept="text/html")
    assert answer.status_code == 406 and "predictions come as" in answer.json()["error"]


@pytest.mark.parametrize("way", [records, inputs, lines, as_csv, arrow, parquet])
def test_a_table_without_rows_is_refused(
    models: httpx.Client, way: Callable[[pd.DataFrame], tuple[Any, str]]
) -> None:
    answer = post(models, "churn", *way(people()[:0]))
    assert (answer.status_code, "it has no rows" in answer.json()["error"]) == (400, True), answer.text
