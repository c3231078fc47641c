"""Frames in a program: a pipeline's answers through a server are those of the pipeline itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import skops.io
from sklearn.compose import ColumnTransformer
from sklearn.ensemble import GradientBoostingClassifier
from sklearn.impute import SimpleImputer
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import OneHotEncoder, OrdinalEncoder, StandardScaler
from tests.support.leaks import local_server

import conch

ROWS = 300


def people() -> pd.DataFrame:
    """Rows with numbers, booleans, texts, categories and nulls, and with an index of their own."""
    random = np.random.default_rng(7)
    frame = pd.DataFrame(
        {
            "age": random.integers(18, 90, ROWS),
            "income": random.lognormal(10, 1, ROWS),
            "active": random.random(ROWS) < 0.5,
            "city": pd.array(random.choice(["Köln", "Oslo", "", 'a,\n"b'], ROWS), dtype="str"),
            "plan": pd.Categorical(random.choice(["basic", "pro"], ROWS), ["pro", "basic", "free"]),
            "visits": pd.array(random.integers(0, 9, ROWS), dtype="Int64"),
        },
        index=pd.Index(range(1000, 1000 + ROWS), name="id"),
    )
    for number, name in enumerate(("income", "city", "visits")):
        frame.loc[frame.index[number :: 3 * (number + 2)], name] = None
    return frame


def fitted(frame: pd.DataFrame) -> Pipeline:
    """A pipeline for such rows whose encoders take what they do not know for nothing."""
    numbers = make_pipeline(SimpleImputer(), StandardScaler())
    columns = ColumnTransformer(
        [
            ("numbers", numbers, ["age", "income", "visits"]),
            ("texts", OneHotEncoder(handle_unknown="ignore"), ["city"]),
            ("plans", OrdinalEncoder(handle_unknown="use_encoded_value", unknown_value=-1), ["plan"]),
            ("booleans", "passthrough", ["active"]),
        ]
    )
    city, plan = frame["city"].fillna("none"), frame["plan"].astype(str)
    score = frame["age"] / 20 + (city == "Oslo") * 2 + (plan == "pro") + frame["active"]
    labels = np.where(score > score.median(), "stays", "leaves")
    pipeline: Pipeline = make_pipeline(columns, GradientBoostingClassifier(n_estimators=10))
    return pipeline.fit(frame, labels)


PEOPLE = people()


@pytest.fixture(scope="module")
def pipeline() -> Pipeline:
    """A fitted pipeline."""
    return fitted(PEOPLE)


@pytest.fixture(scope="module")
def server(pipeline: Pipeline) -> Iterator[conch.Server]:
    """A server whose functions are the pipeline's own."""
    server = conch.Server(grpc_port=0, http_port=0, metrics_port=None, grpc_address="127.0.0.1")
    small = conch.ModelConfig(max_batch_size=64)
    server.bind("probabilities", pipeline.predict_proba, example=PEOPLE.head(20), config=small)

    def labelled(frame: pd.DataFrame) -> pd.DataFrame:
        return pd.DataFrame({"label": pipeline.predict(frame), "older": frame["age"] + 1})

    server.bind("labelled", labelled, example=PEOPLE.head(20))
    with local_server(), server:
        yield server


def directly(server: conch.Server, model: str, frame: Any) -> Any:
    return server.infer_frame(model, frame)


def over_grpc(server: conch.Server, model: str, frame: Any) -> Any:
    with conch.Client(str(server.grpc_url), model) as client:
        return client.infer_frame(frame)


def over_http(server: conch.Server, model: str, frame: Any) -> Any:
    with conch.Client(str(server.http_url), model) as client:
        return client.infer_frame(frame)


def in_coroutines(server: conch.Server, model: str, frame: Any) -> Any:
    async def ask() -> Any:
        async with conch.AsyncClient(str(server.grpc_url), model) as client:
            found, same = await asyncio.gather(
                client.infer_frame(frame), server.infer_frame_async(model, frame)
            )
        assert found.equals(same)
        return found

    return asyncio.run(ask())


WAYS = pytest.mark.parametrize("way", [directly, over_grpc, over_http, in_coroutines])
Way = Callable[[conch.Server, str, Any], Any]


@WAYS
def test_a_frame_has_the_answers_of_the_pipeline(server: conch.Server, pipeline: Pipeline, way: Way) -> None:
    shuffled = PEOPLE[[*reversed(PEOPLE.columns)]].assign(other=1)
    found = way(server, "probabilities", shuffled)
    wanted = pipeline.predict_proba(PEOPLE)
    assert list(found.columns) == ["OUTPUT_1_0", "OUTPUT_1_1"]
    assert found.index.equals(PEOPLE.index)
    np.testing.assert_array_equal(found.to_numpy(), wanted)
    labels = way(server, "labelled", PEOPLE)
    assert labels["label"].tolist() == pipeline.predict(PEOPLE).tolist()
    assert labels["older"].tolist() == (PEOPLE["age"] + 1).tolist()


@pytest.mark.parametrize("convert", [pl.from_pandas, pa.Table.from_pandas])
def test_frames_of_other_libraries_have_them_too(
    server: conch.Server, pipeline: Pipeline, convert: Any
) -> None:
    given = convert(PEOPLE)
    found = over_grpc(server, "labelled", given)
    assert type(found) is type(given)
    assert list(found["label"].to_numpy()) == pipeline.predict(PEOPLE).tolist()


def test_a_row_of_a_frame_is_a_sample(server: conch.Server, pipeline: Pipeline) -> None:
    wanted = pipeline.predict_proba(PEOPLE)
    with conch.Client(str(server.grpc_url), "probabilities") as client:
        for number in range(12):  # with each column missing once
            found = client.infer_sample(**PEOPLE.iloc[number])["OUTPUT_1"]
            np.testing.assert_array_equal(found, wanted[number])
        lists = {name: PEOPLE[name].tolist()[:5] for name in PEOPLE}
        np.testing.assert_array_equal(client.infer_batch(**lists)["OUTPUT_1"], wanted[:5])
    np.testing.assert_array_equal(server.infer("probabilities", lists)["OUTPUT_1"], wanted[:5])


@WAYS
@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"plan": "gold"},
            "column 'plan', row 200: 'gold' is no category of the model: 'pro', 'basic'",
        ),
        ({"age": 30.5}, "column 'age', row 200: 30.5 is no whole number, and the model takes INT64"),
        ({"age": None}, "column 'age', row 200: it is null, which INT64 can't be"),
        ({"visits": 2**53 + 1}, "column 'visits', row 200: 9007199254740993 is a whole number beyond"),
        ({"city": 7}, "column 'city', row 200: must have texts, not 7"),
    ],
)
def test_a_value_that_would_become_another_is_refused(
    server: conch.Server, way: Way, change: dict[str, Any], text: str
) -> None:
    frame = PEOPLE.astype(dict.fromkeys(change, object))
    for name, value in change.items():
        frame.iloc[200, frame.columns.get_loc(name)] = value
    with pytest.raises(conch.InvalidArgumentError) as caught:
        way(server, "probabilities", frame)
    assert text in caught.value.message
    with pytest.raises(conch.InvalidArgumentError, match="column 'age': model 'probabilities' needs it"):
        way(server, "probabilities", PEOPLE.drop(columns="age"))


@WAYS
def test_an_error_of_the_model_names_the_rows(server: conch.Server, way: Way) -> None:
    def careful(frame: pd.DataFrame) -> Any:
        if (frame["x"] == 150).any():
            raise conch.InvalidArgumentError("not this one")
        return frame["x"]

    numbers = pd.DataFrame({"x": range(200)})
    server.bind("careful", careful, example=numbers.head(), config=conch.ModelConfig(max_batch_size=16))
    try:
        with pytest.raises(conch.InvalidArgumentError, match=r"^rows 144 to 159: not this one"):
            way(server, "careful", numbers)
        found = way(server, "careful", numbers.head(100))
        assert found.to_numpy().ravel().tolist() == list(range(100))
        with pytest.raises(conch.InvalidArgumentError, match="the table: it has no rows"):
            way(server, "careful", numbers.head(0))
    finally:
        server.unbind("careful")


def test_rows_before_one_that_does_not_fit_are_sent_once(server: conch.Server) -> None:
    seen: list[int] = []

    def kept(frame: pd.DataFrame) -> Any:
        seen.extend(frame["x"])
        return frame["x"]

    numbers = pd.DataFrame({"x": range(200)})
    wrong = numbers.astype(object)
    wrong.iloc[199, 0] = 0.5
    text = "column 'x', row 199"

    async def ask() -> None:
        async with conch.AsyncClient(str(server.grpc_url), "kept") as client:
            await client.wait()
            with pytest.raises(conch.InvalidArgumentError, match=text):
                await client.infer_frame(wrong)

    server.bind("kept", kept, example=numbers, config=conch.ModelConfig(max_batch_size=16))
    try:
        with conch.Client(str(server.grpc_url), "kept") as client:
            seen.clear()
            with pytest.raises(conch.InvalidArgumentError, match=text):
                client.infer_frame(wrong)
        assert seen
        assert len(seen) == len({*seen})
        seen.clear()
        asyncio.run(ask())
        assert seen
        assert len(seen) == len({*seen})
    finally:
        server.unbind("kept")


def test_functions_get_texts_where_the_example_has_texts() -> None:
    seen: list[Any] = []

    @conch.batch
    def keep(text: Any, raw: Any) -> Any:
        seen.append((text.tolist(), raw.tolist()))
        return {"text": text[:, 0]}

    server = conch.Server(grpc_port=None, http_port=None, metrics_port=None)
    server.bind("keep", keep, example={"text": ["ü"], "raw": [b"x"]})
    with server:
        assert seen == [([["ü"]], [[b"x"]])]
        assert server.infer("keep", {"text": ["ß"], "raw": ["y"]})["text"].tolist() == [["ß".encode()]]
        assert seen[-1] == ([["ß"]], [[b"y"]])


def test_a_request_that_can_not_be_read_fails_alone() -> None:
    sizes: list[int] = []

    def keep(frame: pd.DataFrame) -> Any:
        sizes.append(len(frame))
        return frame

    example = pd.DataFrame({"text": ["a"], "kind": pd.Categorical(["u"])})
    hour = conch.DynamicBatcher(max_queue_delay_microseconds=3_600_000_000, preferred_batch_size=[4])
    server = conch.Server(grpc_port=None, http_port=None, metrics_port=None)
    server.bind("keep", keep, example=example, config=conch.ModelConfig(max_batch_size=4, batcher=hour))

    async def ask() -> list[Any]:
        requests = [("a", "u"), (b"\xff", "u"), ("b", "u"), ("c", "v")]
        arrays = [
            {name: np.array([[value]], object) for name, value in zip(("text", "kind"), values, strict=True)}
            for values in requests
        ]
        calls = [server.infer_async("keep", each) for each in arrays]
        return await asyncio.gather(*calls, return_exceptions=True)

    with server:
        good, bad, also_good, unseen = asyncio.run(ask())
    assert sizes == [1, 2]  # the example, and those that can be read
    assert [each["text"].item() for each in (good, also_good)] == [b"a", b"b"]
    assert str(bad) == "input 'text', row 0: b'\\xff' is no text in UTF-8"
    assert str(unseen) == "input 'kind', row 0: 'v' is none of the categories 'u'"


def test_a_model_of_a_repository_has_the_answers_of_its_pipeline(tmp_path: Path) -> None:
    frame = PEOPLE
    pipeline = fitted(frame)
    version = tmp_path / "people" / "1"
    version.mkdir(parents=True)
    skops.io.dump(pipeline, version / "model.skops")
    (version.parent / "config.pbtxt").write_text('backend: "sklearn"')
    server = conch.Server(tmp_path, grpc_port=0, http_port=0, metrics_port=None, grpc_address="127.0.0.1")
    with local_server(), server:
        for url in (server.grpc_url, server.http_url):
            with conch.Client(str(url), "people") as client:
                assert list(client.infer_frame(frame, outputs=["predict"])) == ["predict"]
        for way in (directly, over_grpc):
            found = way(server, "people", frame)
            assert found["predict"].tolist() == pipeline.predict(frame).tolist()
            probabilities = found[["predict_proba_0", "predict_proba_1"]].to_numpy()
            np.testing.assert_array_equal(probabilities, pipeline.predict_proba(frame))
