"""Servers under measurement, as processes: start, readiness, CPU time, stop."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from bench.protocol import Probe

ROOT = Path(__file__).resolve().parent.parent
REPOSITORIES = ROOT / "bench" / "repositories"
LOGS = ROOT / "bench" / ".cache"
FRONT = "conch.fronts.front_process"
"""Module name in the command line of a front process."""
START_DEADLINE = 60.0
HTTP_DEADLINE = 5.0
STOP_DEADLINE = 15.0
# Triton's Python backend shares memory with its stub under this name, and leaves it behind when it crashes.
STUB_REGIONS = "/dev/shm/triton_python_backend_shm_region_"


class ServerError(RuntimeError):
    """A server did not start, or went away."""


@dataclass(frozen=True)
class Command:
    """Command line and environment of a server."""

    arguments: list[str]
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Ports:
    """Ports of a server."""

    grpc: int
    http: int
    metrics: int

    @classmethod
    def free(cls) -> Ports:
        """Finds ports without listeners, all of them different."""
        with ExitStack() as stack:
            probes = [stack.enter_context(socket.socket()) for _ in range(3)]
            for probe in probes:
                probe.bind(("127.0.0.1", 0))
            return cls(*(int(probe.getsockname()[1]) for probe in probes))


def peers_home() -> Path:
    """Directory into which setup_peers.sh puts Triton and perf_analyzer."""
    return Path(os.environ.get("CONCH_PEERS") or Path.home() / ".cache" / "conch-peers")


COMMON = (REPOSITORIES / "common",)
WITH_ONNX = (*COMMON, REPOSITORIES / "onnx")


def _flags(ports: Ports, repositories: Sequence[Path], more: Sequence[str]) -> list[str]:
    named = [f"--model-repository={repository}" for repository in repositories]
    listen = [f"--grpc-port={ports.grpc}", f"--http-port={ports.http}", f"--metrics-port={ports.metrics}"]
    return [*named, *listen, "--allow-metrics=false", *more]


def conch_command(
    ports: Ports, repositories: Sequence[Path] = WITH_ONNX, flags: Sequence[str] = ()
) -> Command:
    """The installed console script of this checkout's environment."""
    executable = Path(sys.executable).with_name("conch")
    if not executable.exists():
        raise ServerError(
            f"{executable.name} is not installed beside {Path(sys.executable).name}; run make setup"
        )
    return Command([str(executable), "serve", *_flags(ports, repositories, flags)])


def baseline_command(
    checkout: Path, repositories: Sequence[Path] = WITH_ONNX, flags: Sequence[str] = ()
) -> Callable[[Ports], Command]:
    """Another checkout's code in this environment, so that only conch's code differs."""
    paths = [str(checkout.resolve() / folder) for folder in ("services", "control")]
    if not Path(paths[0], "conch").is_dir():
        raise ServerError(f"{checkout} holds no services/conch")
    start = "import sys; from conch.cli import main; sys.exit(main())"
    environment = {"PYTHONPATH": os.pathsep.join(paths)}
    return lambda ports: Command(
        [sys.executable, "-c", start, "serve", *_flags(ports, repositories, flags)], environment
    )


def triton_command(ports: Ports, repositories: Sequence[Path] = COMMON, flags: Sequence[str] = ()) -> Command:
    """The Triton of setup_peers.sh, with its Python-backend models only."""
    home = peers_home() / "triton"
    python = home / "bin" / "python"
    if not python.exists():
        raise ServerError("Triton is not installed; run make bench-setup")
    query = "import sys, sysconfig; print(sysconfig.get_path('purelib')); print(sys.base_prefix)"
    lines = subprocess.run([str(python), "-c", query], check=True, capture_output=True, text=True).stdout
    site, base = lines.splitlines()
    server = Path(site, "pytriton", "tritonserver")
    arguments = [
        str(server / "bin" / "tritonserver"),
        f"--backend-directory={server / 'backends'}",
        *_flags(ports, repositories, flags),
    ]
    environment = {
        "LD_LIBRARY_PATH": f"{site}/nvidia_pytriton.libs:{base}/lib",
        "PYTHONPATH": site,
        "PATH": f"{home / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}",
    }
    return Command(arguments, environment)


def echo_command(ports: Ports) -> Command:
    """The bare echo server, which speaks gRPC only."""
    return Command([sys.executable, "-m", "bench.echo_limit", f"--port={ports.grpc}"])


class BenchServer:
    """One server process and all it starts."""

    def __init__(self, name: str, command: Callable[[Ports], Command]) -> None:
        self.name = name
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self._tree: dict[int, psutil.Process] = {}
        self._regions: set[Path] = set()
        self.address = ""
        self.http = ""
        self.metrics = ""
        self.version = ""

    @property
    def log(self) -> Path:
        """File of the server's output."""
        return LOGS / f"{self.name}.log"

    def launch(self) -> None:
        """Starts it, and does not wait."""
        ports = Ports.free()
        command = self._command(ports)
        LOGS.mkdir(exist_ok=True)
        # A session of its own keeps a Ctrl-C at the terminal from reaching it before its orderly stop.
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command.arguments,
                cwd=ROOT,
                env={**os.environ, **command.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.address = f"127.0.0.1:{ports.grpc}"
        self.http = f"127.0.0.1:{ports.http}"
        self.metrics = f"127.0.0.1:{ports.metrics}"

    def start(self, within_s: float = START_DEADLINE) -> None:
        """Start it and wait until it calls itself ready.

        Raises:
            ServerError: it ended or was not ready in time.
        """
        self.launch()
        try:
            self._wait_ready(time.monotonic() + within_s)
        except BaseException:
            self.stop()
            raise

    def _wait_ready(self, deadline: float) -> None:
        pause = threading.Event()
        with Probe(self.address) as probe:
            while not probe.ready(timeout=0.5):
                if not self.running():
                    raise ServerError(f"{self.name} ended while starting:\n{self.tail()}")
                if time.monotonic() > deadline:
                    raise ServerError(f"{self.name} was not ready in time:\n{self.tail()}")
                pause.wait(0.05)  # it answers, but not yet ready: do not spin
            self.version = probe.version()
        for process in self._processes():
            with suppress(psutil.Error):
                paths = (entry.path for entry in process.memory_maps())
                self._regions.update(Path(path) for path in paths if path.startswith(STUB_REGIONS))

    def wait_for_http(self, within_s: float = HTTP_DEADLINE) -> None:
        """Waits until something listens on its HTTP port: a server may be ready over gRPC before.

        Raises:
            ServerError: nothing did in time.
        """
        host, _, port = self.http.partition(":")
        pause = threading.Event()
        deadline = time.monotonic() + within_s
        while True:
            with suppress(ConnectionRefusedError), socket.create_connection((host, int(port))):
                return
            if time.monotonic() > deadline or not self.running():
                raise ServerError(f"{self.name} does not listen for HTTP")
            pause.wait(0.02)

    @property
    def pid(self) -> int | None:
        """Main process of the server, if it was started."""
        return None if self._process is None else self._process.pid

    def running(self) -> bool:
        """True if the main process lives."""
        return self._process is not None and self._process.poll() is None

    def cpu_seconds(self) -> float:
        """User and system time of its processes so far, with the children they have reaped."""
        total = 0.0
        for process in self._processes():
            with suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system + times.children_user + times.children_system
        return total

    def _processes(self) -> list[psutil.Process]:
        """Processes of the server, and those seen before: a dead parent no longer leads to its children."""
        if self._process is not None:
            with suppress(psutil.NoSuchProcess):
                main = psutil.Process(self._process.pid)
                for process in (main, *main.children(recursive=True)):
                    self._tree.setdefault(process.pid, process)
        return list(self._tree.values())

    def how_it_ended(self, grace: float = 5.0) -> str | None:
        """Text for the table on the end of a server; None if it still runs after `grace` seconds."""
        if self._process is None:
            return "not started"
        try:
            # A crash closes the connections first; the process ends after its core dump or stack trace.
            code = self._process.wait(grace)
        except subprocess.TimeoutExpired:
            return None
        caught = re.findall(r"Signal \((\d+)\) received", self.tail(4000))
        if caught:  # Triton prints the signal that broke it and then ends in its own way
            return f"crashed (signal {caught[-1]})"
        if code < 0:
            return f"crashed (signal {-code}, {signal.Signals(-code).name})"
        return f"ended (exit status {code})"

    def tail(self, characters: int = 1500) -> str:
        """The end of its log."""
        return self.log.read_text(errors="replace")[-characters:] if self.log.exists() else ""

    def stop(self) -> None:
        """End it: SIGTERM and time to finish, then SIGKILL for whatever of it is left."""
        processes = self._processes()
        if self._process is not None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_DEADLINE)
        for process in processes:
            with suppress(psutil.NoSuchProcess):  # psutil tells a reused process id from its process
                process.kill()
        if self._process is not None:
            self._process.wait()
        psutil.wait_procs(processes, timeout=STOP_DEADLINE)
        for region in self._regions:
            region.unlink(missing_ok=True)
        self._process, self._tree, self._regions = None, {}, set()

    def restart(self) -> None:
        """Stop what is left of it and start it anew, on another port."""
        self.stop()
        self.start()
