"""Takes the pictures of docs/console.md with the browser of the tests, from the example models.

Run it from the root of the checkout; tests/setup_browser.sh installs the browser.
"""

from __future__ import annotations

import io
import logging
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import tritonclient.grpc as triton  # noqa: E402
from PIL import Image  # noqa: E402
from tests.support.browser import Visit, chromium  # noqa: E402

import conch  # noqa: E402

PICTURES = ROOT / "docs" / "pictures"
REPOSITORY = Path("/tmp/models")
"""Pictures show where models are: not the directories of this machine."""
SECONDS = 75


def main() -> None:
    """Takes all pictures."""
    PICTURES.mkdir(exist_ok=True)
    shutil.copytree(ROOT / "examples" / "models" / "basic", REPOSITORY)
    flags: dict[str, Any] = {"console_port": 8004, "console_allow_control": True, "console_allow_infer": True}
    logging.getLogger("conch").setLevel(logging.INFO)
    server = conch.Server(REPOSITORY, grpc_port=0, http_port=0, metrics_port=0, **flags)
    try:
        with server, loaded(server), chromium() as browser:
            url = server.console_url
            assert url is not None
            with Visit(browser, url, "light") as light, Visit(browser, url, "dark") as dark:
                _live(light, dark)
            with Visit(browser, url, "light") as visit:
                _try(visit)
    finally:
        shutil.rmtree(REPOSITORY)


@contextmanager
def loaded(server: conch.Server) -> Iterator[None]:
    """Sends requests to some models within the block."""
    ended = threading.Event()
    senders = [threading.Thread(target=_send, args=(server.grpc_url, seed, ended)) for seed in range(6)]
    for sender in senders:
        sender.start()
    yield
    ended.set()
    for sender in senders:
        sender.join()


def _send(url: str | None, seed: int, ended: threading.Event) -> None:
    assert url is not None
    random = Random(seed)
    client = triton.InferenceServerClient(url)
    while not ended.wait(random.expovariate(30 + 10 * seed)):
        rows = random.choice((1, 1, 1, 2, 4, 8))
        image = triton.InferInput("image", [rows, 64], "FP32")
        image.set_data_from_numpy(np.full((rows, 64), random.random(), np.float32))
        if random.random() < 0.7:
            client.infer("digits", [image])
        elif random.random() < 0.8:
            inputs = [triton.InferInput(name, [1, 16], "INT32") for name in ("INPUT0", "INPUT1")]
            for each in inputs:
                each.set_data_from_numpy(np.zeros((1, 16), np.int32))
            client.infer("simple", inputs)
        else:
            file = triton.InferInput("file", [1, 1], "BYTES")
            file.set_data_from_numpy(np.array([[_digit()]], object))
            client.infer("digit_reader", [file])
    client.close()


def _digit() -> bytes:
    pixels = np.load(ROOT / "examples" / "data" / "digits_heldout.npz")
    images = pixels[pixels.files[0]].reshape(-1, 8, 8)
    picture = Image.fromarray((255 - images[3] / images.max() * 255).astype(np.uint8)).resize((96, 96))
    content = io.BytesIO()
    picture.save(content, "PNG")
    return content.getvalue()


def _live(light: Visit, dark: Visit) -> None:
    light.open("models/digits/live")
    dark.open()
    light.page.wait_for_timeout(SECONDS * 1000)
    _save(light, "live")
    _save(dark, "overview-dark")
    light.page.get_by_role("link", name="Overview").click()
    light.page.wait_for_timeout(1500)
    _save(light, "overview")
    dark.page.get_by_role("link", name="Models").click()
    dark.page.wait_for_timeout(1500)
    _save(dark, "models-dark")
    page = dark.open("models/digit_reader/traces")
    page.get_by_role("button", name="Sample next 10").click()
    page.get_by_role("rowheader", name="infer").first.wait_for()
    page.wait_for_timeout(2500)
    _save(dark, "traces-dark")


def _try(visit: Visit) -> None:
    page = visit.open("models/digit_reader/try")
    page.get_by_role("combobox", name="From").select_option("file")
    page.get_by_label("file: Choose a file").set_input_files(
        {"name": "seven.png", "mimeType": "image/png", "buffer": _digit()}
    )
    page.get_by_role("button", name="Send").click()
    page.get_by_text("in the server").wait_for()
    _save(visit, "try")
    page = visit.open("models/digits/config")
    page.get_by_text("No problems are found.").wait_for()
    _save(visit, "config")


def _save(visit: Visit, name: str) -> None:
    picture = Image.open(io.BytesIO(visit.page.screenshot()))
    picture.save(PICTURES / f"{name}.webp", quality=84, method=6)


if __name__ == "__main__":
    main()
