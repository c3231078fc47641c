"""A local Ray with conch's deployment, in the interpreter that has Ray; see `ray_service`."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil
from tests.support.servers import ROOT, eventually, free_port

ENVIRONMENT = Path(os.environ.get("CONCH_RAY", Path.home() / ".cache/conch-tests/ray"))
"""Environment in which `tests/setup_ray.sh` has installed Ray."""

_SCRIPT = Path(__file__).with_name("ray_service.py")
_MARK = "CONCH_RAY_TEST"


class RayCluster:
    """A Ray that runs; `deploy` changes its applications."""

    def __init__(self, process: subprocess.Popen[str], grpc_port: int, http_port: int) -> None:
        self._process = process
        self.url = f"127.0.0.1:{grpc_port}"
        self.http_url = f"http://127.0.0.1:{http_port}"

    def wait_ready(self) -> None:
        """Waits for the answer to its last command."""
        assert self._process.stdout is not None
        for line in self._process.stdout:  # Ray has messages of its own
            if line.startswith(("ready", "failed")):
                assert line == "ready\n", line
                return
        raise AssertionError("Ray has ended")

    def deploy(self, name: str, deployment: Mapping[str, object], args: Mapping[str, object]) -> None:
        """Deploys an application, or changes it where only its `user_config` differs."""
        options = {
            "name": "conch",
            "ray_actor_options": {"num_cpus": 0},
            "health_check_period_s": 1,
            "graceful_shutdown_wait_loop_s": 0.1,
        }
        application = {
            "name": name,
            "route_prefix": f"/{name}",
            "import_path": "conch_ray:build_app",
            "args": args,
            "deployments": [{**options, **deployment}],
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(application) + "\n")
        self._process.stdin.flush()
        self.wait_ready()


@contextmanager
def local_ray() -> Iterator[RayCluster]:
    """Starts a local Ray; after the block all of its processes must end, replicas' workers too."""
    grpc_port, http_port, mark = free_port(), free_port(), str(uuid.uuid4())
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("CONCH_")}
    environment = inherited | {
        "PYTHONPATH": os.pathsep.join(str(ROOT / each) for each in ("services", "control")),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",
        "RAY_SERVE_LOG_TO_STDERR": "0",
        _MARK: mark,
    }
    with tempfile.TemporaryDirectory(prefix="ray") as folder:  # short: it has Unix sockets in it
        command = [str(ENVIRONMENT / "bin/python"), str(_SCRIPT), str(grpc_port), str(http_port), folder]
        # Not a child of this process, as replicas come and go between and within tests.
        with subprocess.Popen(
            ["setsid", "--fork", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        ) as process:
            process.wait()
            try:
                cluster = RayCluster(process, grpc_port, http_port)
                cluster.wait_ready()
                yield cluster
            finally:
                assert process.stdin is not None
                process.stdin.close()
                try:
                    eventually(lambda: not _processes(mark), "Ray stops, and all workers with it")
                finally:
                    for each in _processes(mark):
                        each.kill()


def _processes(mark: str) -> list[psutil.Process]:
    """The processes with the mark in their environment."""
    found = []
    for each in psutil.process_iter():
        try:
            if each.environ().get(_MARK) == mark and each.status() != psutil.STATUS_ZOMBIE:
                found.append(each)
        except psutil.Error:
            continue
    return found
