"""The server of a search: a process on a Unix socket, in which one model is loaded again and again."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.json_format import ParseDict

from conch.protocol import inference_pb2
from conch.protocol.model_config_pb2 import ModelConfig
from conch_tools.connection import Endpoint
from conch_tools.server_api import ServerApi
from conch_tools.tune.variants import CONFIG, copy_repository, variant_text
from conch_tools.whole_files import write_whole

_START_S = 120.0
_LOAD_S = 600.0
_STOP_S = 30.0
_LOAD = "/inference.GRPCInferenceService/RepositoryModelLoad"
_TAIL = 2000


class TrialError(Exception):
    """The server did not start or has ended, or a variant could not be loaded."""


class TrialServer:
    """Serves variants of a model from a copy of its repository.

    Args:
        repository: Only read.
        folder: An empty one, for the copy, the socket and the log.
        others: Models of the repository that are loaded, too.
        flags: More flags of ``conch serve``.
        with_metrics: True if it serves metrics, which have those of GPUs.

    Raises:
        ConchError: There is no such model, or its config is malformed.
    """

    def __init__(
        self,
        repository: Path,
        model: str,
        folder: Path,
        others: Sequence[str],
        flags: Sequence[str],
        with_metrics: bool,
    ) -> None:
        self._copy = folder / "repository"
        self._copy.mkdir()
        self._model, self._log = model, folder / "server.log"
        self._config = self._copy / model / CONFIG
        self.text = copy_repository(repository, model, self._copy)
        self.endpoint = Endpoint("grpc", "", 0, str(folder / "grpc.sock"))
        metrics = ["--allow-metrics=false"]
        self.metrics_url = ""
        if with_metrics:
            port = _free_port()
            metrics = ["--metrics-address=127.0.0.1", f"--metrics-port={port}"]
            self.metrics_url = f"http://127.0.0.1:{port}/metrics"
        self._flags = [
            f"--model-repository={self._copy}",
            "--model-control-mode=explicit",
            f"--grpc-address=unix:{self.endpoint.path}",
            "--allow-http=false",
            *metrics,
            *(f"--load-model={name}" for name in others),
            *flags,
        ]
        self._process: subprocess.Popen[bytes] | None = None
        self._loaded: Mapping[str, Any] | None = None

    def load(self, changes: Mapping[str, Any]) -> None:
        """Loads the model with other values than today's; starts the server if it does not run.

        Raises:
            TrialError: The server cannot be started, or refuses the model.
        """
        if self._process is None or self._process.poll() is not None:
            self._start()
        if changes == self._loaded:
            return
        self._loaded = None
        write_whole(self._config, variant_text(self.text, changes).text)
        request = inference_pb2.RepositoryModelLoadRequest(model_name=self._model)
        try:
            with grpc.insecure_channel(f"unix:{self.endpoint.path}") as channel:
                send = channel.unary_unary(
                    _LOAD,
                    request_serializer=inference_pb2.RepositoryModelLoadRequest.SerializeToString,
                    response_deserializer=inference_pb2.RepositoryModelLoadResponse.FromString,
                )
                send(request, timeout=_LOAD_S)
        except grpc.RpcError as error:
            raise TrialError(error.details() or error.code().name) from None
        self._loaded = dict(changes)

    def config(self) -> ModelConfig:
        """The model's config as the server completed it. Raises AskError."""
        return ParseDict(ServerApi(self.endpoint).config(self._model, ""), ModelConfig())

    def versions(self) -> tuple[str, str]:
        """The server's version, and the model's that it serves. Raises AskError."""
        api = ServerApi(self.endpoint)
        request, answer = inference_pb2.ServerMetadataRequest(), inference_pb2.ServerMetadataResponse
        found = [str(each.get("version", "")) for each in api.statistics(self._model, "")]
        return (str(api.call("ServerMetadata", request, answer)["version"]), ", ".join(found))

    def host_bytes(self) -> int:
        """Memory of the server and its workers; what they share counts once. 0 where it can't be read."""
        if self._process is None:
            return 0
        return sum(_proportional_bytes(each) for each in _descendants(self._process.pid))

    def close(self) -> None:
        """Stops the server."""
        if self._process is None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _start(self) -> None:
        self._loaded = None
        Path(self.endpoint.path).unlink(missing_ok=True)
        command = [sys.executable, "-m", "conch_tools.tune.trial_process", str(os.getpid()), *self._flags]
        with self._log.open("ab") as log:
            # In a session of its own: Ctrl-C ends the window first, then the server.
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        with grpc.insecure_channel(f"unix:{self.endpoint.path}") as channel:
            ready = grpc.channel_ready_future(channel)
            for _ in range(int(_START_S)):
                try:
                    ready.result(timeout=1.0)
                    return
                except grpc.FutureTimeoutError:
                    if self._process.poll() is not None:
                        break
            ready.cancel()
        tail = self._log.read_text(errors="replace")[-_TAIL:].strip()
        raise TrialError(f"the server did not start:\n{tail}")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _descendants(root: int) -> list[int]:
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    found = [root]
    for process in found:
        found.extend(child for child, parent in parents.items() if parent == process)
    return found


def _proportional_bytes(process: int) -> int:
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
