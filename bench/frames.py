"""Rows per second of frames, beside MLServer, MLflow and the library itself: `python -m bench.frames`.

A pipeline of scikit-learn (imputer, scaler, one-hot, gradient boosting of 100 trees; 12 columns of numbers
and 8 of texts) and a LightGBM model (20 numbers, 100 trees) predict all rows of a frame. All ways take
turns, in an order that changes with each round; each is from the frame, or the CSV file, to the predictions,
which have to be equal. Requests to the peers are encoded here, faster than by their own clients. Once:

    for peer in "mlserver 1.7.1 mlserver-sklearn==1.7.1 mlserver-lightgbm==1.7.1" "mlflow 3.17.2"; do
        set -- $peer; python3 -m venv ~/.cache/conch-peers/$1
        ~/.cache/conch-peers/$1/bin/pip install $1==$2 $3 $4 scikit-learn==1.9.1 lightgbm==4.7.0
    done
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any
from urllib.request import Request, urlopen

import grpc
import joblib
import lightgbm
import numpy as np
import orjson
import pandas as pd
import psutil
import pyarrow as pa
import skops.io
from sklearn.compose import ColumnTransformer
from sklearn.ensemble import GradientBoostingClassifier
from sklearn.impute import SimpleImputer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

import conch
from bench import facts
from bench.servers import LOGS, ROOT, BenchServer, Ports, conch_command, peers_home
from conch.protocol import inference_pb2 as messages

ARROW = "application/vnd.apache.arrow.stream"
MODELS = ("pipeline", "lightgbm")
TREES = 100
_TRAINING = 10_000
_START_S = 300.0
_MLFLOW_SAVE = """
import sys, joblib, mlflow, pandas
from mlflow.models import infer_signature
folder = sys.argv[1]
for name, flavor in (("pipeline", mlflow.sklearn), ("lightgbm", mlflow.lightgbm)):
    model, frame = joblib.load(f"{folder}/{name}.joblib")
    more = {"serialization_format": "cloudpickle"} if name == "pipeline" else {}
    signature = infer_signature(frame, model.predict(frame))
    flavor.save_model(model, f"{folder}/mlflow-{name}", signature=signature, **more)
"""

Answer = Callable[[], Any]


def people(rows: int) -> dict[str, pd.DataFrame]:
    """The frame of each model; two columns of the pipeline's miss numbers."""
    random = np.random.default_rng(53)
    numbers = pd.DataFrame({f"n{number}": random.normal(size=rows) for number in range(20)})
    mixed = numbers.iloc[:, :12].copy()
    mixed.loc[random.random(rows) < 0.05, ["n0", "n1"]] = np.nan
    towns = np.array([f"town {number}" for number in range(20)])
    for number in range(8):
        mixed[f"t{number}"] = towns[random.integers(0, len(towns), rows)]
    return {"pipeline": mixed, "lightgbm": numbers}


def trained(frames: Mapping[str, pd.DataFrame]) -> dict[str, Any]:
    """Both models."""
    mixed, numbers = (frames[name][:_TRAINING] for name in MODELS)
    columns = ColumnTransformer(
        [
            ("n", make_pipeline(SimpleImputer(), StandardScaler()), [f"n{number}" for number in range(12)]),
            ("t", OneHotEncoder(handle_unknown="ignore"), [f"t{number}" for number in range(8)]),
        ]
    )
    pipeline = make_pipeline(columns, GradientBoostingClassifier(n_estimators=TREES, random_state=0))
    data = lightgbm.Dataset(numbers, numbers.n0 + numbers.n3**2)
    return {
        "pipeline": pipeline.fit(mixed, mixed.n2 + (mixed.t0 == "town 3") > 0),
        "lightgbm": lightgbm.train({"objective": "regression", "verbose": -1}, data, TREES),
    }


def write_models(models: Mapping[str, Any], frames: Mapping[str, pd.DataFrame], folder: Path) -> None:
    """A model repository of conch, one of MLServer, and MLflow's models."""
    for name in MODELS:
        (folder / "conch" / name / "1").mkdir(parents=True)
        (folder / "mlserver" / name).mkdir(parents=True)
        joblib.dump((models[name], frames[name][:100]), folder / f"{name}.joblib")
        inputs = [
            {"name": column, "datatype": "BYTES", "shape": [-1, 1], "parameters": {"content_type": "str"}}
            for column in frames[name].columns
            if column[0] == "t"
        ]
        implementation = {"pipeline": "sklearn.SKLearnModel", "lightgbm": "lightgbm.LightGBMModel"}[name]
        settings = {"name": name, "implementation": f"mlserver_{implementation}", "inputs": inputs}
        (folder / "mlserver" / name / "model-settings.json").write_text(json.dumps(settings))
    skops.io.dump(models["pipeline"], folder / "conch" / "pipeline" / "1" / "model.skops")
    joblib.dump(models["pipeline"], folder / "mlserver" / "pipeline" / "model.joblib")
    models["lightgbm"].save_model(folder / "conch" / "lightgbm" / "1" / "model.txt")
    models["lightgbm"].save_model(folder / "mlserver" / "lightgbm" / "model.bst")
    python = peers_home() / "mlflow" / "bin" / "python"
    subprocess.run([python, "-c", _MLFLOW_SAVE, folder], check=True, capture_output=True)


@contextmanager
def peer(name: str, ready: str, arguments: list[str], **environment: Any) -> Iterator[None]:
    """A peer's server, from the moment on at which a page of it answers."""
    LOGS.mkdir(exist_ok=True)
    tools = peers_home() / name / "bin"
    paths = os.pathsep.join([str(tools), os.environ.get("PATH", "")])
    variables = {**os.environ, "PATH": paths, **{key: str(value) for key, value in environment.items()}}
    with (LOGS / f"{name}.log").open("ab") as log:
        command = [str(tools / name), *arguments]
        process = subprocess.Popen(command, env=variables, stdout=log, stderr=log)
    try:
        until = time.monotonic() + _START_S
        while True:
            with suppress(OSError), urlopen(ready):
                break
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"{name} did not start: {log.name}")
            time.sleep(0.2)
        yield
    finally:
        process.terminate()
        process.wait()


def split(frame: pd.DataFrame) -> bytes:
    """A frame as JSON, which MLflow and conch take."""
    return orjson.dumps(
        {"dataframe_split": {"columns": list(frame.columns), "data": frame.to_numpy(object).tolist()}}
    )


def arrow(frame: pd.DataFrame) -> bytes:
    """A frame as a stream of Arrow."""
    table = pa.Table.from_pandas(frame)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def post(url: str, body: bytes, kind: str, accept: str = "application/json") -> bytes:
    """The reply to a body."""
    headers = {"Content-Type": kind, "Accept": accept}
    with urlopen(Request(url, body, headers)) as answer:
        return bytes(answer.read())


def by_json(url: str, frame: pd.DataFrame) -> Any:
    """Predictions by an invocation in JSON."""
    found = orjson.loads(post(url, split(frame), "application/json"))["predictions"]
    return [each["predict"] for each in found] if isinstance(found[0], dict) else found


def by_arrow(url: str, frame: pd.DataFrame) -> Any:
    """Predictions by an invocation in Arrow."""
    reply = post(url, arrow(frame), ARROW, ARROW)
    return pa.ipc.open_stream(reply).read_all()["predict"].to_numpy()


def by_mlserver_rest(url: str, frame: pd.DataFrame) -> Any:
    """Predictions by MLServer's REST, a column in each input."""
    inputs = [
        {"name": name, "datatype": "FP64", "shape": [len(frame), 1], "data": values.tolist()}
        if values.dtype.kind == "f"
        else {"name": name, "datatype": "BYTES", "shape": [len(frame), 1], "data": values.tolist()}
        for name, values in frame.items()
    ]
    body = orjson.dumps({"inputs": inputs, "parameters": {"content_type": "pd"}})
    return orjson.loads(post(url, body, "application/json"))["outputs"][0]["data"]


def by_mlserver_grpc(channel: grpc.Channel, model: str, frame: pd.DataFrame) -> Any:
    """Predictions by MLServer's gRPC, with raw contents."""
    request = messages.ModelInferRequest(model_name=model)
    request.parameters["content_type"].string_param = "pd"
    for name, values in frame.items():
        kind = "FP64" if values.dtype.kind == "f" else "BYTES"
        request.inputs.add(name=str(name), datatype=kind, shape=[len(frame), 1])
        if kind == "FP64":
            request.raw_input_contents.append(values.to_numpy().tobytes())
        else:
            texts = (each.encode() for each in values.tolist())
            request.raw_input_contents.append(
                b"".join(len(text).to_bytes(4, "little") + text for text in texts)
            )
    call = channel.unary_unary(
        "/inference.GRPCInferenceService/ModelInfer",
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=messages.ModelInferResponse.FromString,
    )
    reply = call(request)
    dtype = {"INT64": np.int64, "FP64": np.float64, "BOOL": np.bool_}[reply.outputs[0].datatype]
    return np.frombuffer(reply.raw_output_contents[0], dtype)


def by_command(address: str, model: str, source: Path, target: Path, many: bool = False) -> Any:
    """Predictions of a CSV file by the command, with its start."""
    command = [str(Path(sys.executable).with_name("conch")), "infer", model, "--csv", str(source)]
    more = ["--out", str(target), "--output", "predict", "-u", f"grpc://{address}"]
    subprocess.run([*command, *more], check=True, capture_output=True)
    return None if many else pd.read_csv(target)["predict"]


def contestants(
    model: str,
    library: Any,
    frame: pd.DataFrame,
    folder: Path,
    server: BenchServer,
    client: conch.Client,
    stack: ExitStack,
) -> dict[str, Answer]:
    """All ways to the predictions of a model, by name; starts the peers."""
    source = folder / f"{model}.csv"
    frame.to_csv(source, index=False)
    ports = Ports.free()
    settings = {
        "MLSERVER_HTTP_PORT": ports.http,
        "MLSERVER_GRPC_PORT": ports.grpc,
        "MLSERVER_METRICS_PORT": ports.metrics,
        "MLSERVER_PARALLEL_WORKERS": 0,  # no copy to a process of the model
        "MLSERVER_GRPC_MAX_MESSAGE_LENGTH": -1,
    }
    mlserver = f"http://127.0.0.1:{ports.http}/v2/models/{model}"
    stack.enter_context(
        peer("mlserver", f"{mlserver}/ready", ["start", str(folder / "mlserver")], **settings)
    )
    mlflow = f"http://127.0.0.1:{Ports.free().http}"
    flags = ["models", "serve", "-m", str(folder / f"mlflow-{model}"), "--env-manager", "local"]
    stack.enter_context(peer("mlflow", f"{mlflow}/ping", [*flags, "-p", mlflow.rpartition(":")[2]]))
    size = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
    channel = stack.enter_context(grpc.insecure_channel(f"127.0.0.1:{ports.grpc}", options=size))
    url = f"http://{server.http}/v2/models/{model}/invocations"
    return {
        "in the process": lambda: library.predict(frame),
        "`infer_frame`": lambda: client.infer_frame(frame, outputs=["predict"])["predict"],
        "`conch infer --csv`": partial(by_command, server.address, model, source, folder / "out.csv"),
        "conch, Arrow": partial(by_arrow, url, frame),
        "conch, JSON": partial(by_json, url, frame),
        "MLServer, gRPC": partial(by_mlserver_grpc, channel, model, frame),
        "MLServer, REST": partial(by_mlserver_rest, f"{mlserver}/infer", frame),
        "MLflow": partial(by_json, f"{mlflow}/invocations", frame),
    }


def processor_s() -> float:
    """Processor time of this process and of all that it has started."""
    own = psutil.Process()
    return sum(sum(each.cpu_times()[:4]) for each in (own, *own.children(recursive=True)))


@dataclass(frozen=True)
class Cost:
    """Seconds of a way in a round, by the clock and of processors, with those of servers."""

    seconds: float
    cpu: float


def measure(ways: Mapping[str, Answer], rounds: int) -> dict[str, list[Cost]]:
    """Costs of each way in each round, after one that warms up and compares the predictions."""
    costs: dict[str, list[Cost]] = {name: [] for name in ways}
    right = np.asarray(ways["in the process"](), float)
    for number in range(rounds + 1):
        for name in list(ways) if number % 2 else reversed(list(ways)):
            cpu, began = processor_s(), time.perf_counter()
            found = ways[name]()
            cost = Cost(time.perf_counter() - began, processor_s() - cpu)
            if number:
                costs[name].append(cost)
            elif not np.array_equal(np.asarray(found, float), right):
                raise RuntimeError(f"{name} predicts something else")
    return costs


def table(costs: Mapping[str, list[Cost]], rows: int) -> str:
    """Medians, and ratios of the same round with their quartiles."""
    lines = [
        "| way | rows/s | time beside the process | CPU | time beside `infer_frame` | CPU |",
        "|---" + "|--:" * 5 + "|",
    ]
    for name, found in costs.items():
        shown = [f"{rows / median(each.seconds for each in found):,.0f}"]
        for other in ("in the process", "`infer_frame`"):
            pairs = list(zip(found, costs[other], strict=True))
            for ratios in ([a.seconds / b.seconds for a, b in pairs], [a.cpu / b.cpu for a, b in pairs]):
                low, middle, high = quantiles(ratios, n=4, method="inclusive")
                shown.append(f"{middle:.2f} ({low:.2f} - {high:.2f})")
        lines.append(f"| {name} | {' | '.join(shown)} |")
    return "\n".join(lines)


def peak_mib(server: BenchServer) -> int:
    """The most memory that the server has had."""
    status = Path(f"/proc/{server.pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) >> 10


def memory(frame: pd.DataFrame, folder: Path, model: str) -> Iterator[str]:
    """The server's memory while ten times the rows pass, in Python and in a shell."""
    server = BenchServer("frames", partial(conch_command, repositories=(folder / "conch",)))
    server.start()
    try:
        with conch.Client(server.address, model) as client:
            yield f"{model}, peak of the server: {peak_mib(server)} MiB after the start"
            client.infer_frame(frame[:1000])
            yield f"{peak_mib(server)} after 1,000 rows"
            client.infer_frame(frame)
            yield f"{peak_mib(server)} after {len(frame):,}"
            many = pd.concat([frame] * 10, ignore_index=True)
            client.infer_frame(many)
            yield f"{peak_mib(server)} after {len(many):,} by `infer_frame`"
        many.to_csv(folder / "many.csv", index=False)
        by_command(server.address, model, folder / "many.csv", folder / "out.csv", many=True)
        yield f"{peak_mib(server)} after {len(many):,} by `conch infer --csv`"
    finally:
        server.stop()


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--memory", action="store_true", help="memory of the server instead of times")
    options = parser.parse_args()
    frames = people(options.rows)
    models = trained(frames)
    print("\n".join(f"{name}: {value}" for name, value in facts.machine().items()))
    print(f"revision: {facts.revision(ROOT)}", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_models(models, frames, folder)
        for name in options.models.split(","):
            if options.memory:
                print("; ".join(memory(frames[name], folder, name)), flush=True)
                continue
            server = BenchServer("frames", partial(conch_command, repositories=(folder / "conch",)))
            server.start()
            try:
                with ExitStack() as stack:
                    client = stack.enter_context(conch.Client(server.address, name))
                    ways = contestants(name, models[name], frames[name], folder, server, client, stack)
                    costs = measure(ways, options.rounds)
                print(f"\n{name}\n\n{table(costs, options.rows)}", flush=True)
            finally:
                server.stop()


if __name__ == "__main__":
    main()
