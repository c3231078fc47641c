"""A headless Chromium for the tests of the console, and what is seen on its pages."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.waiting import PATIENCE_S

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

TOOLS = Path(os.environ.get("CONCH_BROWSER", Path.home() / ".cache" / "conch-tests" / "browser"))
AXE = TOOLS / "node_modules" / "axe-core" / "axe.min.js"
PICTURES = Path(__file__).resolve().parents[2] / "build" / "console"
_NAMES = ("chromium", "chromium-browser", "google-chrome")
_ARGUMENTS = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--disable-quic",
]


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser; skips where Playwright or Chromium is missing."""
    path = next(filter(None, map(shutil.which, _NAMES)), None)
    if path is None:
        pytest.skip("Chromium is not installed: see tests/setup_browser.sh")
    playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=_ARGUMENTS)
        try:
            yield browser
        finally:
            browser.close()


class Visit:
    """A page of a console, and what went wrong on it.

    Args:
        browser: The browser.
        url: The console.
        scheme: ``light`` or ``dark``.
        width: Width in pixels.
        height: Height in pixels.

    Attributes:
        page: Playwright's page.
        problems: Errors of scripts, policy violations and dialogs.
    """

    def __init__(
        self, browser: Browser, url: str, scheme: Any = "light", width: int = 1280, height: int = 860
    ) -> None:
        self.url = url
        self._context = browser.new_context(
            color_scheme=scheme,
            viewport={"width": width, "height": height},
            reduced_motion="reduce",
            permissions=["clipboard-read", "clipboard-write"],
        )
        self.page: Page = self._context.new_page()
        self.page.set_default_timeout(1000 * PATIENCE_S)
        self.problems: list[str] = []
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("dialog", self._dialog)
        self.page.on("console", self._line)

    def _dialog(self, dialog: Any) -> None:
        self.problems.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def _line(self, line: Any) -> None:
        # The browser notes answers with an error, which are meant, and lost connections.
        expected = "Failed to load resource" in line.text or "net::ERR" in line.text
        if line.type == "error" and not expected:
            self.problems.append(line.text)

    def __enter__(self) -> Visit:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        self._context.close()
        if kind is None:
            assert self.problems == []

    def open(self, path: str = "") -> Page:
        """Opens a page, such as ``models/simple/try``, and waits for its heading."""
        self.page.goto(f"{self.url}/#/{path}")
        self.page.locator("h1").first.wait_for()
        return self.page

    def cookies(self) -> list[Any]:
        """The cookies of the page."""
        return list(self._context.cookies())

    def picture(self, name: str) -> Path:
        """Takes a picture of what is visible."""
        PICTURES.mkdir(parents=True, exist_ok=True)
        path = PICTURES / f"{name}.png"
        path.write_bytes(self.page.screenshot())  # Playwright would write it on a thread that stays
        return path

    def axe(self) -> list[str]:
        """Serious problems that axe-core finds on the page."""
        if not AXE.exists():
            pytest.skip("axe-core is not installed: see tests/setup_browser.sh")
        # Not by a script element, which the policy of the page refuses.
        self.page.evaluate(AXE.read_text())
        found = self.page.evaluate("async () => (await axe.run()).violations")
        return [
            f"{each['id']}: {each['help']}: {[node['html'][:120] for node in each['nodes'][:3]]}"
            for each in found
            if each["impact"] in ("serious", "critical")
        ]
