"""`conch pull` as a process: from a hub by its library, from S3, and what an interruption leaves."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from tests.support.emulators import s3_emulator
from tests.support.model_site import COMMIT, ModelSite, Page, gguf_bytes, model_site
from tests.support.servers import CONCH, WAIT_S, eventually
from tests.support.terminals import terminal

pytestmark = pytest.mark.process


@pytest.fixture
def site() -> Iterator[ModelSite]:
    with model_site() as made:
        yield made


@pytest.fixture
def cdn() -> Iterator[ModelSite]:
    with model_site() as made:
        yield made


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return gguf_bytes(tmp_path_factory.mktemp("random"))


def pull(into: Path, environment: Mapping[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the command."""
    return subprocess.run(
        [str(CONCH), "pull", *arguments, "--into", str(into)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )


def hub(site: ModelSite, home: Path) -> dict[str, str]:
    """Variables that name a site as the hub."""
    return {"HF_ENDPOINT": site.url, "HF_HOME": str(home), "HF_TOKEN": "hf_secret"}


def test_a_hub(site: ModelSite, cdn: ModelSite, content: bytes, tmp_path: Path) -> None:
    """The file, and its revision; the token goes to the hub and not where it redirects to."""
    files = {"tiny-F16.gguf": content, "tiny-Q8_0.gguf": b"GGUF", "generation_config.json": b'{"top_k": 7}'}
    site.put_hub("org/tiny-GGUF", files, cdn)
    environment = hub(site, tmp_path / "home")
    several = pull(tmp_path, environment, "org/tiny-GGUF")
    assert several.returncode == 1
    assert "choose one with --file: tiny-F16.gguf (" in several.stderr

    done = pull(tmp_path, environment, "org/tiny-GGUF", "--revision", "v1", "--file", "*f16*", "--name", "a")
    assert "--file: no file is '*f16*'" in done.stderr
    done = pull(tmp_path, environment, "org/tiny-GGUF", "--revision", "v1", "--file", "*F16*")
    assert done.stdout == f"{tmp_path / 'tiny' / '1'}\n", done.stderr
    assert (tmp_path / "tiny" / "1" / "model.gguf").read_bytes() == content
    assert (tmp_path / "tiny" / "1" / "generation_config.json").read_text() == '{"top_k": 7}'
    assert {each.headers.get("authorization") for each in site.asked} <= {None, "Bearer hf_secret"}
    (resolved,) = (each for each in site.asked if each.path.endswith("F16.gguf"))
    assert resolved.headers.get("Authorization") == "Bearer hf_secret"
    assert len(cdn.asked) == 1
    assert "Authorization" not in cdn.asked[0].headers


def test_files_in_the_hubs_cache_are_linked(
    site: ModelSite, cdn: ModelSite, content: bytes, tmp_path: Path
) -> None:
    site.put_hub("org/tiny", {"tiny.gguf": content}, cdn)
    cached = tmp_path / "home" / "hub" / "models--org--tiny" / "snapshots" / COMMIT / "tiny.gguf"
    cached.parent.mkdir(parents=True)
    cached.write_bytes(content)
    done = pull(tmp_path / "models", hub(site, tmp_path / "home"), "hf://org/tiny/tiny.gguf")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "models" / "tiny" / "1" / "model.gguf").samefile(cached)
    assert cdn.asked == []

    reference = tmp_path / "home" / "hub" / "models--org--tiny" / "refs" / "main"
    reference.parent.mkdir()
    reference.write_text(COMMIT)
    offline = {**hub(site, tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    asked = len(site.asked)
    done = pull(tmp_path / "offline", offline, "org/tiny")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "offline" / "tiny" / "1" / "model.gguf").samefile(cached)
    for absent in (["org/other"], ["org/tiny", "--revision", "v2"]):
        done = pull(tmp_path / "offline", offline, *absent, "--name", "b")
        assert done.returncode == 1
        assert f"HF_HUB_OFFLINE is set, and the cache has no '{absent[0]}'" in done.stderr
    assert len(site.asked) == asked


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (
            404,
            "RepoNotFound",
            "the hub has no 'org/tiny', or it is private: is the name right, and is HF_TOKEN",
        ),
        (403, "GatedRepo", "'org/tiny' is only for those that have agreed to its terms"),
        (
            404,
            "RevisionNotFound",
            "the hub has no 'org/tiny' with the revision 'v9': --revision names another",
        ),
        (400, "", "can't list 'org/tiny': "),
    ],
)
def test_what_a_hub_refuses(status: int, code: str, message: str, site: ModelSite, tmp_path: Path) -> None:
    page = Page(b"{}", status=status, headers={"X-Error-Code": code})
    site.pages["/api/models/org/tiny/revision/v9"] = page
    done = pull(tmp_path, hub(site, tmp_path / "home"), "org/tiny", "--revision", "v9")
    assert done.returncode == 1
    assert message in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


def test_names_of_a_hub_control_no_terminal(site: ModelSite, cdn: ModelSite, tmp_path: Path) -> None:
    site.put_hub("org/odd", {"\x1b[2J.gguf": b"GGUF" + bytes(50)}, cdn)
    done = pull(tmp_path, hub(site, tmp_path / "home"), "org/odd")
    assert "'?[2J.gguf' is no GGUF file" in done.stderr


@pytest.mark.slow
def test_a_store(content: bytes, tmp_path: Path) -> None:
    with s3_emulator() as emulator:
        bucket = emulator.bucket("bucket")
        bucket.put("models/one.gguf", content)
        bucket.put("models/two.gguf", b"GGUF")
        where = emulator.location("bucket", "models")
        done = pull(tmp_path, emulator.environment(), f"{where}/one.gguf")
        assert done.returncode == 0, done.stderr
        missing = pull(tmp_path, emulator.environment(), f"{where}/three.gguf")
    assert (tmp_path / "one" / "1" / "model.gguf").read_bytes() == content
    assert os.listdir(tmp_path / "one") == ["1"]
    assert "does not have 'three.gguf': is the location right?" in missing.stderr


def test_an_interrupted_pull_goes_on(site: ModelSite, content: bytes, tmp_path: Path) -> None:
    """With a bar on a terminal; servers see nothing of what is left."""
    busy = Page(content, '"a"', breaks=[1000])
    site.pages["/m.gguf"] = busy
    command = [str(CONCH), "pull", f"{site.url}/m.gguf", "--into", str(tmp_path)]
    with terminal(*command) as shown:
        partial = tmp_path / ".m-1.pull" / "1" / "model.gguf.partial"
        eventually(lambda: partial.exists() and partial.stat().st_size == 1000, "it has begun")
        busy.status = 503
        shown.wait_for(lambda _: "kB" in shown.output, "a bar is shown")
        shown.signal(signal.SIGINT)
        assert shown.wait() == 130
        assert "interrupted; the same command goes on" in shown.output
    assert [each for each in os.listdir(tmp_path) if not each.startswith(".")] == []
    busy.status = 0
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 0, done.stderr
    assert site.ranges("/m.gguf")[-1] == "bytes=1000-"
    assert (tmp_path / "m" / "1" / "model.gguf").read_bytes() == content
    assert os.listdir(tmp_path) == ["m"]
