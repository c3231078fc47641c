"""The console's pages of rollouts and front processes, in a real browser."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.support.browser import Visit, chromium
from tests.support.console import open_console
from tests.support.loading import model_text, write_number
from tests.support.servers import LocalServer, eventually

pytestmark = [pytest.mark.browser, pytest.mark.slow]

DECLARED = """
[labels]
stable = 1
champion = 1
[rollout]
candidate = "newest"
steps = ["shadow 100% 1h", "20% 1h", "50% 1h"]
keep = "1h"
[rollout.guard]
requests = 20
errors = 0.05
"""


def _write(repository: Path) -> None:
    write_number(repository, "m", extra="version_policy { latest { num_versions: 1 } }", versions=(1, 2))
    for version in (1, 2):
        (repository / "m" / str(version) / "model.py").write_text(model_text(version))
    (repository / "m" / "rollout.toml").write_text(DECLARED)


@contextmanager
def _asked(server: LocalServer) -> Iterator[None]:
    """Requests all the time, a hundred a second at most."""
    inputs = [{"name": "IN", "datatype": "FP32", "shape": [1], "data": [1]}]
    enough = threading.Event()

    def ask() -> None:
        with httpx.Client(base_url=f"http://{server.http_address}", timeout=60) as client:
            while not enough.wait(0.01):
                client.post("/v2/models/m/infer", json={"inputs": inputs}).raise_for_status()

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        enough.set()
        thread.join()


def _state(page: Any, text: str) -> None:
    page.locator(".panel .state", has_text=text).first.wait_for()


def test_a_rollout_is_watched_and_aborted(tmp_path: Path) -> None:
    repository = tmp_path / "models"
    _write(repository)
    with (
        chromium() as browser,
        open_console(repository, "--model-control-mode=poll", "--front-ends=2") as server,
        Visit(browser, server.console_url) as visit,
        _asked(server),
    ):
        page = visit.open("models/m/rollout")
        page.get_by_role("cell", name="candidate", exact=True).wait_for()
        page.get_by_text("Pairs that differ most").wait_for()
        page.get_by_role("button", name="Next step").click()
        page.locator(".steps li.now", has_text="20% 1h").wait_for()
        page.get_by_role("button", name="Pause").click()
        _state(page, "Paused")
        page.get_by_role("button", name="Resume").click()
        _state(page, "Under way")
        visit.picture("rollout")
        page = visit.open("")
        page.get_by_role("row", name="front 1").wait_for()
        page.get_by_role("link", name="m", exact=True).first.wait_for()
        page.locator(".events li", has_text="Paused").first.wait_for()
        visit.picture("overview-rollout")
        page = visit.open("models")
        page.locator(".badge", has_text="champion").wait_for()
        page = visit.open("models/m/rollout")
        page.get_by_role("button", name="Abort").click()
        page.get_by_role("dialog").get_by_role("button", name="Abort").click()
        _state(page, "Aborted")
        assert not page.get_by_role("button", name="Abort").is_visible()
        eventually(lambda: "asks the rollout of 'm' to abort" in page_log(server), "it is logged")


def page_log(server: LocalServer) -> str:
    return httpx.get(f"{server.console_url}/api/logs").text
