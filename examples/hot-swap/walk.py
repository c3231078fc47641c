"""Swaps a model under load, by copying directories: see README.md beside this file."""

import argparse
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from tritonclient.grpc import InferenceServerClient, InferInput
from tritonclient.utils import InferenceServerException

EXAMPLES = Path(__file__).resolve().parents[1]
DIGITS = EXAMPLES / "models" / "basic" / "digits"
SMALL = EXAMPLES / "hot-swap" / "small.onnx"
CLIENTS = 4
PATIENCE_S = 60.0


class Clients:
    """Clients that never stop asking, and write down what they get."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self.answers: Counter[str] = Counter()
        self.right: Counter[str] = Counter()
        self.images: Counter[str] = Counter()
        self.failures: list[str] = []
        with np.load(EXAMPLES / "data" / "digits_heldout.npz") as data:
            self._images, self._labels = data["images"].astype(np.float32), data["labels"]

    @contextmanager
    def asking(self) -> Iterator[None]:
        threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(CLIENTS)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._stop.set()
            for thread in threads:
                thread.join()

    def _ask(self, number: int) -> None:
        chance = np.random.default_rng(number)
        with InferenceServerClient(self._address) as client:
            while not self._stop.is_set():
                chosen = chance.choice(len(self._images), 8)
                image = InferInput("image", [8, 64], "FP32")
                image.set_data_from_numpy(self._images[chosen])
                try:
                    result = client.infer("digits", [image], client_timeout=PATIENCE_S)
                except InferenceServerException as error:
                    self.failures.append(str(error))
                    continue
                right = int((result.as_numpy("digit")[:, 0] == self._labels[chosen]).sum())
                with self._lock:
                    version = result.get_response().model_version
                    self.answers[version] += 1
                    self.right[version] += right
                    self.images[version] += 8


def wait_until(what: str, seen: Callable[[], bool]) -> float:
    """Waits for something to happen; returns the seconds that took."""
    begin = time.monotonic()
    while not seen():
        if time.monotonic() - begin > PATIENCE_S:
            sys.exit(f"error: waited {PATIENCE_S:.0f} s in vain: {what}")
        time.sleep(0.01)
    return time.monotonic() - begin


def states(client: InferenceServerClient) -> dict[str, tuple[str, str]]:
    """State and reason of each version."""
    index = client.get_model_repository_index(client_timeout=PATIENCE_S)
    return {model.version: (model.state, model.reason) for model in index.models}


@contextmanager
def server(repository: Path, port: int) -> Iterator[str]:
    """A server that watches a repository."""
    flags = [f"--model-repository={repository}", "--model-control-mode=watch", f"--grpc-port={port}"]
    command = [str(Path(sys.executable).with_name("conch")), "serve", *flags, "--log-info=false"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        yield f"localhost:{port}"
    finally:
        process.terminate()
        process.wait()


def ready(client: InferenceServerClient) -> bool:
    try:
        return client.is_server_ready(client_timeout=PATIENCE_S)
    except InferenceServerException:
        return False


def walk(repository: Path, address: str) -> None:
    model = repository / "digits"
    clients = Clients(address)
    with InferenceServerClient(address) as client:
        wait_until("the server is ready", lambda: ready(client))
        with clients.asking():
            wait_until("version 1 has answered a while", lambda: clients.answers["1"] >= 500)
            print(f"{CLIENTS} clients get their answers from version 1")

            shutil.copytree(DIGITS / "1", model / "2")
            took = wait_until("version 2 answers", lambda: clients.answers["2"] > 0)
            print(f"version 2 copied into the repository; {took:.1f} s later it answers")
            wait_until("version 1 is gone", lambda: states(client)["1"] == ("UNAVAILABLE", "unloaded"))
            print("version 1 has finished its last request and is unloaded")
            wait_until("version 2 has answered a while", lambda: clients.answers["2"] >= 500)

            broken = (DIGITS / "1" / "model.onnx").read_bytes()[:1000]
            (model / "3").mkdir()
            (model / "3" / "model.onnx").write_bytes(broken)
            wait_until("version 3 fails", lambda: states(client).get("3", ("",))[0] == "UNAVAILABLE")
            print(f"version 3 is broken: {states(client)['3'][1]}")
            before = clients.answers["2"]
            wait_until("version 2 still answers", lambda: clients.answers["2"] >= before + 500)
            print("version 2 goes on")
    for version in sorted(clients.answers):
        accuracy = clients.right[version] / clients.images[version]
        print(f"version {version}: {clients.answers[version]} answers, {accuracy:.1%} of the digits right")
    print(f"{len(clients.failures)} requests failed")
    if clients.failures or clients.answers["3"]:
        sys.exit(f"error: no request should fail, and version 3 should not answer: {clients.failures[:3]}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8011, help="gRPC port of the server that this starts")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="conch-hot-swap-") as folder:
        repository = Path(folder)
        (repository / "digits" / "1").mkdir(parents=True)
        for name in ("config.pbtxt", "labels.txt"):
            shutil.copy(DIGITS / name, repository / "digits" / name)
        shutil.copy(SMALL, repository / "digits" / "1" / "model.onnx")
        with server(repository, options.port) as address:
            walk(repository, address)
