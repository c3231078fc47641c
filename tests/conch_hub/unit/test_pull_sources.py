"""`conch pull` against servers that speak the protocols of its sources, in this process."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.model_site import ModelSite, Page, gguf_bytes, model_site

from conch_control.repository.local import LocalRepository
from conch_hub import pull_command
from conch_hub.download import Download, Downloader
from conch_hub.http_client import HttpClient
from conch_hub.source import PullError
from conch_hub.sources.registry import Reference
from conch_hub.version_folder import VersionFolder

MODEL = "application/vnd.ollama.image.model"
PARAMETERS = "application/vnd.ollama.image.params"
TITLE = "org.opencontainers.image.title"
Layer = tuple[str, bytes, dict[str, str]]


@pytest.fixture
def site() -> Iterator[ModelSite]:
    with model_site() as made:
        yield made


@pytest.fixture
def other() -> Iterator[ModelSite]:
    with model_site() as made:
        yield made


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return gguf_bytes(tmp_path_factory.mktemp("random"))


def pull(into: Path, *arguments: str) -> int:
    return pull_command.run([*arguments, "--into", str(into)])


def fetched(site: ModelSite, path: str, size: int, target: Path, sha256: str = "", pauses: int = 99) -> None:
    """Downloads a page without pauses between tries; another try than these fails."""
    left = iter(range(pauses))
    downloader = Downloader(HttpClient(), lambda _: next(left))
    downloader.fetch(Download(f"{site.url}{path}", size, sha256), target, lambda _: None)


class TestUrls:
    def test_a_file_appears_with_its_version(
        self, site: ModelSite, content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        site.pages["/Some%Model.Q8_0.gguf"] = Page(content, '"a"')
        sha256 = hashlib.sha256(content).hexdigest()
        assert pull(tmp_path, f"{site.url}/Some%25Model.Q8_0.gguf?x=1", "--sha256", sha256) == 0
        place = tmp_path / "Some-Model.Q8_0" / "1"
        assert capsys.readouterr().out == f"{place}\n"
        assert (place / "model.gguf").read_bytes() == content
        assert [each.name for each in tmp_path.rglob("*")] == ["Some-Model.Q8_0", "1", "model.gguf"]

        assert pull(tmp_path, f"{site.url}/Some%25Model.Q8_0.gguf") == 1
        assert "is there: remove it, or give another --version or --name" in capsys.readouterr().err
        assert pull(tmp_path, f"{site.url}/Some%25Model.Q8_0.gguf", "--version", "2") == 0
        assert sorted(os.listdir(place.parent)) == ["1", "2"]

    def test_all_parts_of_a_split_file(self, site: ModelSite, content: bytes, tmp_path: Path) -> None:
        for number in (1, 2):
            site.pages[f"/m-{number:05}-of-00002.gguf"] = Page(content)
        assert pull(tmp_path, f"{site.url}/m-00001-of-00002.gguf") == 0
        assert sorted(os.listdir(tmp_path / "m" / "1")) == [
            "model-00001-of-00002.gguf",
            "model-00002-of-00002.gguf",
        ]
        assert (tmp_path / "m" / "config.pbtxt").read_text() == 'backend: "llama_cpp"\n'

    @pytest.mark.parametrize("by_sha256", [False, True])
    def test_an_answer_that_breaks_off_is_continued(
        self, by_sha256: bool, site: ModelSite, content: bytes, tmp_path: Path
    ) -> None:
        site.pages["/m"] = Page(content, '"a"', breaks=[1000, 500])
        target = tmp_path / "m.gguf"
        fetched(site, "/m", len(content), target, hashlib.sha256(content).hexdigest() if by_sha256 else "")
        assert target.read_bytes() == content
        assert site.ranges("/m") == [None, "bytes=1000-", "bytes=1500-"]
        sent = [each.headers.get("If-Range") for each in site.asked]
        assert sent == [None, None, None] if by_sha256 else [None, '"a"', '"a"']
        assert os.listdir(tmp_path) == ["m.gguf"]

    def test_a_part_without_digest_or_tag_is_fetched_again(
        self, site: ModelSite, content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Nothing tells that it has not changed since an earlier try."""
        first, second = "/m-00001-of-00002.gguf", "/m-00002-of-00002.gguf"
        site.pages.update({first: Page(content), second: Page(b"GGUF" + bytes(len(content) - 4))})
        assert pull(tmp_path, f"{site.url}{first}") == 1
        assert "is no GGUF file" in capsys.readouterr().err
        changed = content[:-1] + b"x"
        site.pages.update({first: Page(changed), second: Page(changed)})
        assert pull(tmp_path, f"{site.url}{first}") == 0
        for number in (1, 2):
            part = tmp_path / "m" / "1" / f"model-{number:05}-of-00002.gguf"
            assert part.read_bytes() == changed

    def test_another_process_goes_on(self, site: ModelSite, content: bytes, tmp_path: Path) -> None:
        site.pages["/m"] = Page(content, '"a"', breaks=[1000])
        with pytest.raises(StopIteration):
            fetched(site, "/m", len(content), tmp_path / "m", pauses=0)
        fetched(site, "/m", len(content), tmp_path / "m")
        assert site.ranges("/m") == [None, "bytes=1000-"]
        assert (tmp_path / "m").read_bytes() == content

    @pytest.mark.parametrize(("tag", "ranges"), [('"b"', True), ("", True), ('"a"', False)])
    def test_changed_content_begins_again(
        self, tag: str, ranges: bool, site: ModelSite, content: bytes, tmp_path: Path
    ) -> None:
        """Also that of a server without entity tags, or without ranges."""
        before = Page(bytes(len(content)), '"a"' if tag else "", breaks=[1000])
        site.pages["/m"] = before
        with pytest.raises(StopIteration):
            fetched(site, "/m", len(content), tmp_path / "m", pauses=0)
        site.pages["/m"] = Page(content, tag, ranges=ranges)
        fetched(site, "/m", len(content), tmp_path / "m")
        assert (tmp_path / "m").read_bytes() == content

    def test_a_server_that_sends_nothing_is_given_up(self, site: ModelSite, tmp_path: Path) -> None:
        site.pages["/m"] = Page(bytes(100), status=503)
        with pytest.raises(PullError, match="answers with HTTP status 503; the same command goes on"):
            fetched(site, "/m", 100, tmp_path / "m")
        assert len(site.asked) == 5

    def test_wrong_content_is_removed(self, site: ModelSite, content: bytes, tmp_path: Path) -> None:
        site.pages["/m"] = Page(content, '"a"')
        with pytest.raises(PullError, match=r"has the SHA-256 .* was expected"):
            fetched(site, "/m", len(content), tmp_path / "m", "0" * 64)
        assert os.listdir(tmp_path) == []

    @pytest.mark.parametrize(
        ("page", "message"),
        [
            (Page(b"<!DOCTYPE html>"), "is no GGUF file: it begins with b'<!DO'"),
            (Page(b"GGUF" + bytes(100)), "is no GGUF file: it has version 0"),
            (Page(b"GGUF" + bytes(100), headers={"Content-Encoding": "gzip"}), "is sent compressed"),
            (Page(b"x", secret="Bearer x"), "HTTP status 401: give what it asks for with -H"),
            (Page(b"x", status=404), "HTTP status 404: is the address right?"),
        ],
    )
    def test_what_is_no_model(
        self, page: Page, message: str, site: ModelSite, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        site.pages["/m.gguf"] = page
        assert pull(tmp_path, f"{site.url}/m.gguf") == 1
        assert message in capsys.readouterr().err
        assert not (tmp_path / "m").exists()

    def test_secrets_stay_with_their_host(
        self, site: ModelSite, other: ModelSite, content: bytes, tmp_path: Path
    ) -> None:
        other.pages["/m.gguf"] = Page(content, '"a"')
        site.pages["/here.gguf"] = Page(place="/m.gguf")
        site.pages["/m.gguf"] = Page(place=f"{other.url}/m.gguf")
        assert pull(tmp_path, f"{site.url}/here.gguf", "-H", "Authorization=Bearer hush") == 0
        assert {each.headers.get("Authorization") for each in site.asked} == {"Bearer hush"}
        assert {each.path for each in site.asked} == {"/here.gguf", "/m.gguf"}
        assert {each.headers.get("Authorization") for each in other.asked} == {None}

    def test_a_malformed_header_is_not_repeated(
        self, site: ModelSite, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """The form of curl, whose padding has an equals sign."""
        with pytest.raises(SystemExit, match="2"):
            pull(tmp_path, f"{site.url}/m.gguf", "-H", "Authorization: Basic aHVzaA==")
        errors = capsys.readouterr().err
        assert "-H takes NAME=VALUE" in errors
        assert "aHVzaA" not in errors

    def test_redirects_end(self, site: ModelSite, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        site.pages["/m.gguf"] = Page(place="/m.gguf")
        assert pull(tmp_path, f"{site.url}/m.gguf") == 1
        assert "redirects more than 5 times" in capsys.readouterr().err
        site.pages["/m.gguf"] = Page(place="http://[x")
        assert pull(tmp_path, f"{site.url}/m.gguf") == 1
        assert "redirects to 'http://[x', which is no URL" in capsys.readouterr().err
        site.pages["/m.gguf"] = Page(place="http://models.example/m.gguf")
        assert pull(tmp_path, f"{site.url}/m.gguf") == 1
        assert "has no TLS" in capsys.readouterr().err

    def test_the_disk_must_have_room(
        self,
        site: ModelSite,
        content: bytes,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        free = shutil.disk_usage(tmp_path)._replace(free=len(content) - 1)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
        site.pages["/m.gguf"] = Page(content)
        assert pull(tmp_path, f"{site.url}/m.gguf") == 1
        assert f"and {len(content)} are needed" in capsys.readouterr().err
        assert site.ranges("/m.gguf") == ["bytes=0-3"], "nothing was fetched"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ftp://x/y.gguf"], "'ftp://x/y.gguf' is no source of models: it is"),
        (["model.gguf"], "'model.gguf' is no source of models"),
        (["http://models.example/m.gguf"], "has no TLS, so that others may read and change it"),
        (["https://a:b@models.example/m.gguf"], "'https://models.example/m.gguf': histories and logs keep"),
        (["https://models.example/m.gguf", "--revision", "x"], "--revision is for models of a hub"),
        (["https://models.example/m.gguf", "--sha256", "12"], "--sha256 has 64 digits"),
        (["org/m", "--sha256", "1" * 64], "--sha256 is for https://"),
        (["org/m", "-H", "A=b"], "-H is for https:// and oci://"),
        (["https://models.example/m.gguf", "--name", "../m"], "'../m' can't be the name of a model"),
        (["oci://name:tag"], "'name:tag' has no registry"),
        (["oci://models.example/Name"], "is no name of a model in a registry"),
        (["s3://bucket/../m.gguf"], "must not hold '.' or '..'"),
    ],
)
def test_refused_by_name(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert pull(tmp_path, *arguments) == 1
    assert message in capsys.readouterr().err
    assert os.listdir(tmp_path) == []


class TestRegistries:
    def test_ollamas_format(
        self, site: ModelSite, content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """With a token that the registry gives, weights on another path by digest, and parameters."""
        parameters = json.dumps({"temperature": 0.5, "repeat_penalty": 1.1, "stop": ["x"], "num_ctx": 9})
        layers: list[Layer] = [
            (MODEL, content, {}),
            (PARAMETERS, parameters.encode(), {}),
            ("application/vnd.ollama.image.template", b"{{ .Prompt }}", {}),
            ("application/vnd.ollama.image.license", b"MIT", {}),
        ]
        site.put_image("library/tiny", "1b", layers, token="t0ken")
        assert pull(tmp_path, f"ollama://127.0.0.1:{site.port}/tiny:1b") == 0
        place = tmp_path / "tiny-1b" / "1"
        assert (place / "model.gguf").read_bytes() == content
        found = json.loads((place / "generation_config.json").read_text())
        assert found == {"temperature": 0.5, "repetition_penalty": 1.1}
        assert sorted(os.listdir(place)) == ["generation_config.json", "model.gguf"]
        errors = capsys.readouterr().err
        assert "parameters that have no effect here: num_ctx, stop" in errors
        assert "its template in Go's language: that of the GGUF file is used" in errors
        assert site.asked[0].headers.get("Authorization") is None
        (asked,) = (each for each in site.asked if each.path == "/token")
        assert asked.headers.get("Authorization") is None

    def test_dockers_format(self, site: ModelSite, content: bytes, tmp_path: Path) -> None:
        layers: list[Layer] = [
            ("application/vnd.docker.ai.gguf.v3", content, {}),
            ("application/vnd.docker.ai.chat.template.file", b"{{ messages }}", {}),
        ]
        site.put_image("ai/tiny", "latest", layers)
        assert pull(tmp_path, f"oci://127.0.0.1:{site.port}/ai/tiny") == 0
        assert (tmp_path / "tiny" / "1" / "chat_template.jinja").read_text() == "{{ messages }}"
        assert (tmp_path / "tiny" / "1" / "model.gguf").read_bytes() == content

    def test_titles_stay_in_the_folder(
        self, site: ModelSite, content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        site.put_image("m", "latest", [("x/y", content, {TITLE: "../../../escaped.gguf"})])
        assert pull(tmp_path / "in", f"oci://127.0.0.1:{site.port}/m") == 0
        assert [each.name for each in tmp_path.rglob("*.gguf")] == ["model.gguf"]
        layers = [
            ("x/y", b"<xml/>", {TITLE: "openvino_model.xml"}),
            ("x/y", b"{}", {TITLE: "../config.json"}),
        ]
        site.put_image("folder", "latest", layers)
        assert pull(tmp_path / "in", f"oci://127.0.0.1:{site.port}/folder") == 0
        assert os.listdir(tmp_path / "in" / "folder" / "1") == ["openvino_model.xml"]
        site.put_image("odd", "latest", [("x/y", b"x", {TITLE: "\x1b[2J.bin"})])
        assert pull(tmp_path / "in", f"oci://127.0.0.1:{site.port}/odd") == 1
        assert "there are ?[2J.bin" in capsys.readouterr().err

    def test_damaged_layers_and_manifests(
        self, site: ModelSite, content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        site.put_image("m", "latest", [(MODEL, content, {})])
        digest = hashlib.sha256(content).hexdigest()
        site.pages[f"/v2/m/blobs/sha256:{digest}"] = Page(content[:-1] + b"x")
        where = f"oci://127.0.0.1:{site.port}/m"
        assert pull(tmp_path, where) == 1
        assert f"and {digest} was expected" in capsys.readouterr().err
        by_digest = next(path for path in site.pages if "/manifests/sha256:" in path)
        site.pages[by_digest] = Page(b"{}")
        assert pull(tmp_path, f"{where}@{by_digest.rpartition('/')[2]}") == 1
        assert "answers with a manifest that has another digest" in capsys.readouterr().err
        site.pages["/v2/m/manifests/latest"] = Page(b'{"layers": [{"digest": "md5:1", "size": 1}]}')
        assert pull(tmp_path, where) == 1
        assert "a layer without a digest with sha256" in capsys.readouterr().err
        assert not (tmp_path / "m").exists()

    def test_a_token_that_expires_is_renewed(
        self, site: ModelSite, content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Between a manifest and its layers; a registry that takes no token is asked for one once."""
        site.put_image("m", "latest", [(MODEL, content, {})], token="first")
        blob = site.pages[f"/v2/m/blobs/sha256:{hashlib.sha256(content).hexdigest()}"]
        blob.secret = "Bearer never"
        assert pull(tmp_path, f"oci://127.0.0.1:{site.port}/m") == 1
        assert "HTTP status 401: is the address right, and may you read it?" in capsys.readouterr().err
        assert [each.path for each in site.asked].count("/token") == 2
        assert pull(tmp_path, f"oci://127.0.0.1:{site.port}/m", "-H", "Authorization=Bearer first") == 1
        assert [each.path for each in site.asked].count("/token") == 2, "those of -H are the user's"
        site.asked.clear()
        site.tokens = ["first", "second"]
        blob.secret = "Bearer second"
        assert pull(tmp_path, f"oci://127.0.0.1:{site.port}/m") == 0
        assert (tmp_path / "m" / "1" / "model.gguf").read_bytes() == content

    def test_names(self) -> None:
        ollama = {"host": "registry.ollama.ai", "namespace": "library"}
        found = [
            str(Reference.parse("docker.io/ai/smollm2")),
            str(Reference.parse("ghcr.io/a/b@sha256:" + "1" * 64)),
            str(Reference.parse("localhost:5000/a:v1")),
            str(Reference.parse("smollm2:135m", **ollama)),
            str(Reference.parse("me/mine", **ollama)),
        ]
        assert found == [
            "registry-1.docker.io/ai/smollm2:latest",
            f"ghcr.io/a/b@sha256:{'1' * 64}",
            "localhost:5000/a:v1",
            "registry.ollama.ai/library/smollm2:135m",
            "registry.ollama.ai/me/mine:latest",
        ]


class TestVersionFolders:
    def test_one_pull_at_a_time(self, tmp_path: Path) -> None:
        with VersionFolder(tmp_path, "m"), pytest.raises(PullError, match="another conch pull fills"):
            VersionFolder(tmp_path, "m")

    def test_leftovers_of_other_content_go(self, tmp_path: Path) -> None:
        for identity, left in (("a", False), ("a", True), ("b", False)):
            with VersionFolder(tmp_path, "m") as folder:
                folder.begin(identity)
                assert (folder.path / "model.gguf").exists() is left
                (folder.path / "model.gguf").write_text(identity)

    def test_a_config_is_not_forced_on_other_versions(self, tmp_path: Path) -> None:
        (tmp_path / "m" / "1").mkdir(parents=True)
        with VersionFolder(tmp_path, "m", 2) as folder:
            folder.begin("a")
            with pytest.raises(PullError, match=r"has no config.pbtxt, and this version needs one"):
                folder.publish('backend: "openvino_genai"\n', ["openvino_genai"])
        assert os.listdir(tmp_path / "m") == ["1"]

    @pytest.mark.parametrize(
        ("config", "message"),
        [
            ('backend: "python"', "has a config.pbtxt with the backend 'python'"),
            ("nonsense", "config.pbtxt:1:1: "),
            (None, "is a file: remove it, or give another --name"),
        ],
    )
    def test_a_model_that_does_not_fit_is_refused_at_once(
        self,
        config: str | None,
        message: str,
        site: ModelSite,
        content: bytes,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        """Before anything is fetched."""
        site.pages["/m.gguf"] = Page(content, '"a"')
        if config is None:
            (tmp_path / "m").write_text("")
        else:
            (tmp_path / "m" / "1").mkdir(parents=True)
            (tmp_path / "m" / "config.pbtxt").write_text(config)
        assert pull(tmp_path, f"{site.url}/m.gguf", "--version", "2") == 1
        assert message in capsys.readouterr().err
        assert set(site.ranges("/m.gguf")) <= {"bytes=0-3"}
        assert os.listdir(tmp_path) == ["m"]

    def test_a_repository_is_a_directory(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        with pytest.raises(SystemExit, match="2"):
            pull_command.run(["https://models.example/m.gguf", "--into", "s3://bucket/models"])
        assert os.listdir(tmp_path) == []

    def test_a_listing_never_sees_a_half_version(
        self, site: ModelSite, content: bytes, tmp_path: Path
    ) -> None:
        """A server's repository has no model beside a pull, or all of it."""
        site.pages["/m.gguf"] = Page(content, '"a"')
        seen: list[list[tuple[object, ...]]] = []
        ended = threading.Event()

        def look() -> None:
            while not ended.is_set():
                models = LocalRepository(tmp_path).models().values()
                seen.append([entry[:2] for model in models for entry in model.fingerprint()])

        looks = threading.Thread(target=look)
        looks.start()
        try:
            assert pull(tmp_path, f"{site.url}/m.gguf") == 0
        finally:
            ended.set()
            looks.join()
        whole = [("1/", 0), ("1/model.gguf", len(content))]
        assert all(each in ([], whole) for each in seen)
        assert whole == [entry[:2] for entry in LocalRepository(tmp_path).models()["m"].fingerprint()]
