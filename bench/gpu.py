"""Measures models on a GPU behind conch beside the same models called directly: `python -m bench.gpu`.

Needs a CUDA device, torch, torchvision and tritonclient[cuda]; ONNX models also need onnxruntime-gpu. Each
scene runs the model without a server (`direct`) and behind conch in turns, round by round. Clients are
processes of their own, whose tensors lie in CUDA regions or travel in the message. Copies between host and
device are counted by CUPTI, through torch's profiler, in the process of the server.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

PIXELS = (3, 224, 224)
CLASSES = 1000
CONFIG = """
backend: "{backend}"
max_batch_size: 64
input {{ name: "x" data_type: TYPE_FP32 dims: [ 3, 224, 224 ] }}
output {{ name: "y" data_type: TYPE_FP32 dims: [ 1000 ] }}
instance_group {{ kind: KIND_GPU count: 1 }}
parameters {{ key: "FORCE_CPU_ONLY_INPUT_TENSORS" value {{ string_value: "no" }} }}
parameters {{ key: "CONCH_PLACEMENT" value {{ string_value: "{placement}" }} }}
"""
ONNX_CONFIG = CONFIG.partition("parameters")[0]
MODEL = '''
import torch, torchvision
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """A ResNet with random weights."""

    def initialize(self, args):
        torch.manual_seed(0)
        torch.backends.cudnn.benchmark = True
        self.model = torchvision.models.resnet50().eval().cuda()

    @torch.inference_mode()
    def execute(self, requests):
        answers = []
        for request in requests:
            x = torch.from_dlpack(pb_utils.get_input_tensor_by_name(request, "x")).cuda()
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor.from_dlpack("y", self.model(x))]))
        torch.cuda.synchronize()
        return answers
'''


def resnet() -> Any:
    """The model that all scenes run, on the GPU."""
    import torch
    import torchvision

    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    return torchvision.models.resnet50().eval().cuda()


def write_repository(root: Path, with_onnx: bool) -> None:
    """Writes the models: Python in process and in a worker, and ONNX."""
    for placement in ("in_process", "worker"):
        version = root / f"torch_{placement}" / "1"
        version.mkdir(parents=True)
        (version / "model.py").write_text(MODEL)
        (version.parent / "config.pbtxt").write_text(CONFIG.format(backend="python", placement=placement))
    if with_onnx:
        import torch

        version = root / "onnx" / "1"
        version.mkdir(parents=True)
        (version.parent / "config.pbtxt").write_text(ONNX_CONFIG.format(backend="onnxruntime"))
        example = torch.randn(2, *PIXELS, device="cuda")
        torch.onnx.export(
            resnet(),
            (example,),
            str(version / "model.onnx"),
            input_names=["x"],
            output_names=["y"],
            dynamo=False,
            dynamic_axes={"x": {0: "n"}, "y": {0: "n"}},
        )


def direct(kind: str, batch: int, count: int, path: str, ready: Any, go: Any, results: Any) -> None:
    """Calls the model in a loop, its input on the GPU, without a server."""
    import torch

    x = torch.randn(batch, *PIXELS, device="cuda")
    if kind == "onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(path, providers=["CUDAExecutionProvider"])
        y = torch.empty(batch, CLASSES, device="cuda")
        binding = session.io_binding()
        binding.bind_input("x", "cuda", 0, np.float32, tuple(x.shape), x.data_ptr())
        binding.bind_output("y", "cuda", 0, np.float32, tuple(y.shape), y.data_ptr())

        def call() -> None:
            session.run_with_iobinding(binding)
            binding.synchronize_outputs()

    else:
        model = resnet()

        def call() -> None:
            with torch.inference_mode():
                model(x)
            torch.cuda.synchronize()

    _measured(call, count, ready, go, results)


def client(
    url: str, model: str, batch: int, count: int, regions: bool, ready: Any, go: Any, results: Any
) -> None:
    """Repeats one request, one at a time."""
    import tritonclient.grpc as triton
    import tritonclient.utils.cuda_shared_memory as cudashm

    values = np.random.default_rng(0).standard_normal((batch, *PIXELS), dtype=np.float32)
    size = batch * CLASSES * 4
    with ExitStack() as stack:
        connection = triton.InferenceServerClient(url)
        stack.callback(connection.close)
        given, wanted = triton.InferInput("x", list(values.shape), "FP32"), triton.InferRequestedOutput("y")
        if regions:
            for label, nbytes, tensor in (("in", values.nbytes, given), ("out", size, wanted)):
                name = f"{label}-{model}-{os.getpid()}"
                region = cudashm.create_shared_memory_region(name, nbytes, 0)
                stack.callback(cudashm.destroy_shared_memory_region, region)
                connection.register_cuda_shared_memory(name, cudashm.get_raw_handle(region), 0, nbytes)
                stack.callback(connection.unregister_cuda_shared_memory, name)
                tensor.set_shared_memory(name, nbytes)
                if label == "in":
                    cudashm.set_shared_memory_region(region, [values])
        else:
            given.set_data_from_numpy(values)
        _measured(lambda: connection.infer(model, [given], outputs=[wanted]), count, ready, go, results)


def _measured(call: Callable[[], object], count: int, ready: Any, go: Any, results: Any) -> None:
    for _ in range(max(5, count // 10)):
        call()
    ready.release()
    go.wait()
    took = []
    for _ in range(count):
        began = time.perf_counter()
        call()
        took.append(time.perf_counter() - began)
    results.put((sum(took), took))


def run(
    target: Callable[..., None], arguments: tuple[Any, ...], workers: int, count: int
) -> tuple[float, float]:
    """Runs processes side by side; calls per second of all together, and the median time of a call in ms."""
    context = mp.get_context("spawn")
    ready, go, results = context.Semaphore(0), context.Event(), context.Queue()
    processes = [
        context.Process(target=target, args=(*arguments, ready, go, results)) for _ in range(workers)
    ]
    for process in processes:
        process.start()
    for _ in processes:
        while not ready.acquire(timeout=1):
            if any(each.exitcode for each in processes):
                raise RuntimeError("a process of the benchmark failed; its error is above")
    go.set()
    found = [results.get() for _ in processes]
    for process in processes:
        process.join()
    return workers * count / max(total for total, _ in found), 1e3 * median(
        t for _, took in found for t in took
    )


@contextmanager
def serving(repository: Path) -> Iterator[str]:
    """Runs `conch serve` on the repository; gives its gRPC address."""
    command = [
        str(Path(sys.executable).with_name("conch")),
        "serve",
        f"--model-repository={repository}",
        "--grpc-port=18001",
        "--allow-http=false",
        "--allow-metrics=false",
    ]
    with subprocess.Popen(command) as process:
        try:
            import tritonclient.grpc as triton

            deadline = time.monotonic() + 180
            with triton.InferenceServerClient("127.0.0.1:18001") as connection:
                while not _ready(connection):
                    if process.poll() is not None or time.monotonic() > deadline:
                        raise RuntimeError("the server did not become ready")
                    time.sleep(0.2)
            yield "127.0.0.1:18001"
        finally:
            process.terminate()


def _ready(connection: Any) -> bool:
    try:
        return bool(connection.is_server_ready())
    except Exception:
        return False


def copies(repository: Path, model: str, batch: int, regions: bool, count: int) -> Counter[str]:
    """Counts what is copied, in bytes per request by direction, in a server in this process."""
    import torch

    import conch

    flags: dict[str, Any] = {
        "grpc_port": 18002,
        "allow_http": False,
        "allow_metrics": False,
        "model_control_mode": "explicit",
        "load_model": [model],
    }
    with conch.Server(repository, **flags):
        arguments = ("127.0.0.1:18002", model, batch, count, regions)
        context = mp.get_context("spawn")
        ready, go, results = context.Semaphore(0), context.Event(), context.Queue()
        process = context.Process(target=client, args=(*arguments, ready, go, results))
        process.start()
        ready.acquire()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            go.set()
            results.get()
            torch.cuda.synchronize()
        process.join()
    found: Counter[str] = Counter()
    trace = Path(tempfile.mkdtemp()) / "trace.json"
    profile.export_chrome_trace(str(trace))
    for event in json.loads(trace.read_text())["traceEvents"]:
        if event.get("cat") == "gpu_memcpy":
            found[event["name"].split(" (")[0].removeprefix("Memcpy ")] += event["args"]["bytes"]
    return Counter({way: total // count for way, total in found.items()})


def main() -> None:
    """Runs the scenes and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--clients", default="1,2,4")
    parser.add_argument("--onnx", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    lines = [
        "| model | batch | way | clients | requests/s, median [min-max] | p50 ms | of direct |",
        "|---|--:|---|--:|--:|--:|--:|",
    ]
    with tempfile.TemporaryDirectory() as folder:
        repository = Path(folder)
        write_repository(repository, options.onnx)
        names = ["torch_in_process", "torch_worker", *(["onnx"] if options.onnx else [])]
        with serving(repository) as url:
            for batch in map(int, options.batches.split(",")):
                ways: dict[tuple[str, str, int], list[tuple[float, float]]] = {}
                for _ in range(options.rounds):
                    for kind in ("torch", *(["onnx"] if options.onnx else [])):
                        path = str(repository / "onnx" / "1" / "model.onnx")
                        figures = run(direct, (kind, batch, options.count, path), 1, options.count)
                        ways.setdefault((kind, "direct", 1), []).append(figures)
                    for name in names:
                        for number in map(int, options.clients.split(",")):
                            arguments = (url, name, batch, options.count, True)
                            figures = run(client, arguments, number, options.count)
                            ways.setdefault((name, "CUDA regions", number), []).append(figures)
                        figures = run(client, (url, name, batch, options.count, False), 1, options.count)
                        ways.setdefault((name, "message", 1), []).append(figures)
                for (name, way, number), found in ways.items():
                    base = ways[name.partition("_")[0], "direct", 1]
                    rates = [rate for rate, _ in found]
                    ratio = median(rate / other for (rate, _), (other, _) in zip(found, base, strict=True))
                    lines.append(
                        f"| {name} | {batch} | {way} | {number} | {median(rates):.0f}"
                        f" [{min(rates):.0f}-{max(rates):.0f}] | {median(p50 for _, p50 in found):.2f} |"
                        f" {ratio:.2f} |"
                    )
                    print(lines[-1], flush=True)
        lines += ["", "| model | way | bytes per request copied, batch 8 |", "|---|---|---|"]
        for name in names:
            for regions in (True, False):
                if name != "torch_worker":
                    found_copies = copies(repository, name, 8, regions, 50)
                    text = (
                        ", ".join(f"{way} {nbytes:,}" for way, nbytes in sorted(found_copies.items()))
                        or "none"
                    )
                    lines.append(f"| {name} | {'CUDA regions' if regions else 'message'} | {text} |")
                    print(lines[-1], flush=True)
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
