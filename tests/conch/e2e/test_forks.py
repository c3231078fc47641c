"""Processes that models in the server's process start: they keep nothing of the server open."""

from __future__ import annotations

import os
import signal
import socket
from contextlib import closing, suppress
from pathlib import Path

import pytest
from tests.support.calling import run, write_script
from tests.support.servers import WAIT_S, client_of, free_port, serving_process

STARTED = {
    "forks": "import os\nresult = os.fork()\nif not result:\n    time.sleep(600)\n    os._exit(0)",
    "executes": "import subprocess\nresult = subprocess.Popen(['sleep', '600'], close_fds=False).pid",
}


@pytest.mark.parametrize("how", STARTED)
def test_a_process_of_a_model_holds_no_port(tmp_path: Path, how: str) -> None:
    write_script(tmp_path / "models")
    control, metrics = tmp_path / "control", free_port()
    flags = [f"--metrics-port={metrics}", f"--control-address=unix:{control}"]
    pid = 0
    try:
        with serving_process(tmp_path / "models", flags=flags) as server:
            addresses = [server.address, server.http_address, f"127.0.0.1:{metrics}"]
            places = [(host, int(port)) for host, port in (each.rsplit(":", 1) for each in addresses)]
            kept = socket.create_connection(places[1])
            with client_of(server) as client:
                pid = int(run(client, STARTED[how]))
                assert run(client, "result = 1") == "1"  # the server itself goes on
        kept.settimeout(WAIT_S)
        with closing(kept):
            assert kept.recv(1) == b""
        os.kill(pid, 0)
        for place in places:
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(place)
        gone = pytest.raises((ConnectionRefusedError, FileNotFoundError))
        with closing(socket.socket(socket.AF_UNIX)) as other, gone:
            other.connect(str(control))
    finally:
        if pid:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
