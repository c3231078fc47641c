"""A registry as a model repository: which versions there are, what is staged, what failures do."""

from __future__ import annotations

import base64
import json
import os
import sys
from functools import partial
from pathlib import Path

import pytest
from tests.support.emulators import s3_emulator
from tests.support.faulty_proxy import Fault, Seen
from tests.support.mlflow_registry import RegistryPlace, mlmodel, onnx_files, triton_files
from tests.support.repositories import Told, stage, tree_of
from tests.support.waiting import given_time

from conch.core.errors import InvalidArgumentError, UnavailableError
from conch_control.repository.source import Declared, Labelled, ModelSource
from conch_mlflow.mlflow_repository import MlflowRepository
from conch_mlflow.registry_http import MOST_JSON, decoded

SEARCH = "registered-models/search"


def served(repository: MlflowRepository) -> dict[str, list[int]]:
    """The versions of each model."""
    return {name: versions_of(source) for name, source in repository.models().items()}


def versions_of(source: ModelSource) -> list[int]:
    return [int(path.rstrip("/")) for path, *_ in source.fingerprint()]


def labels_of(source: ModelSource) -> dict[str, int]:
    assert isinstance(source, Labelled)
    return dict(source.labels())


def test_aliases_say_which_versions_are_served(place: RegistryPlace) -> None:
    registry = place.registry
    for _ in range(4):
        registry.register("aliased", onnx_files())
        registry.register("plain", onnx_files())
    registry.models["aliased"].aliases = {"champion": 2, "challenger": 3}
    registry.models["plain"].versions[2].tags["conch.serve"] = "true"
    registry.register("staged", onnx_files(), stage="Production")
    registry.register("staged", onnx_files())
    registry.register("empty", onnx_files(), status="FAILED_REGISTRATION")
    with place.opened() as repository:
        repository.check()
        assert served(repository) == {"aliased": [2, 3], "plain": [2], "staged": [1, 2]}
        models = repository.models()
        assert labels_of(models["aliased"]) == {"champion": 2, "stable": 2, "challenger": 3}
        assert labels_of(models["staged"]) == {"production": 1}
    with place.opened("?alias=champion,other") as repository:
        assert served(repository) == {"aliased": [2], "plain": [2]}
        assert labels_of(repository.models()["aliased"]) == {"champion": 2, "stable": 2}


def test_which_version_is_stable_and_what_a_tag_declares(
    place: RegistryPlace, caplog: pytest.LogCaptureFixture
) -> None:
    registry = place.registry
    for _ in range(3):
        registry.register("m", onnx_files())
    model = registry.models["m"]
    model.aliases = {"champion": 1, "best": 2, "2nd": 2}
    with place.opened() as repository:
        source = repository.models()["m"]
        assert isinstance(source, Declared) and source.rollout_declaration() is None
        assert labels_of(source) == {"champion": 1, "best": 2, "stable": 1}
        assert caplog.text.count("alias '2nd' of registered model 'm' can't be a label") == 1
        model.aliases["stable"] = 2
        model.tags["conch.rollout"] = '[rollout]\ncandidate = "newest"'
        source = repository.models()["m"]
        assert labels_of(source)["stable"] == 2
        assert isinstance(source, Declared) and source.rollout_declaration() == model.tags["conch.rollout"]
        # A version that is not ready moves no label.
        registry.register("m", onnx_files(), "best", status="PENDING_REGISTRATION")
        assert labels_of(repository.models()["m"])["best"] == 2
    model.aliases |= {"best": 3}
    with place.opened("?stable=best") as repository:
        assert labels_of(repository.models()["m"])["stable"] == 3
    with place.opened("?stable=other") as repository:
        assert "stable" not in labels_of(repository.models()["m"])


def test_a_moved_alias_changes_the_versions_although_no_timestamp_does(place: RegistryPlace) -> None:
    registry = place.registry
    for _ in range(3):
        registry.register("m", onnx_files())
    registry.models["m"].aliases = {"champion": 1}
    with place.opened() as repository:
        before = repository.models()["m"].fingerprint()
        assert repository.models()["m"].fingerprint() == before
        registry.models["m"].aliases = {"champion": 3}
        after = repository.models()["m"]
        assert versions_of(after) == [3] and after.fingerprint() != before
        registry.models["m"].aliases = {"champion": 1}
        assert repository.models()["m"].fingerprint() == before


def test_a_version_that_is_not_ready_waits_and_its_alias_stays(place: RegistryPlace) -> None:
    registry = place.registry
    registry.register("aliased", onnx_files(), "champion")
    registry.register("plain", onnx_files())
    with place.opened() as repository:
        assert served(repository) == {"aliased": [1], "plain": [1]}
        new = registry.register("aliased", onnx_files(), "champion", status="PENDING_REGISTRATION")
        newest = registry.register("plain", onnx_files(), status="PENDING_REGISTRATION")
        registry.register("first", onnx_files(), "champion", status="PENDING_REGISTRATION")
        assert served(repository) == {"aliased": [1], "plain": [1]}
        new.status = newest.status = "READY"
        assert served(repository) == {"aliased": [2], "plain": [2]}
        registry.delete("aliased", 2)
        assert served(repository)["aliased"] == [1]


def test_a_version_registered_again_is_another_one(place: RegistryPlace) -> None:
    place.registry.register("m", onnx_files(b"old"), "champion")
    with place.opened() as repository:
        before = repository.models()["m"].fingerprint()
        assert tree_of(stage(repository.models()["m"]).directory)["1/model.onnx"] == b"old"
        del place.registry.models["m"]
        place.registry.register("m", onnx_files(b"new"), "champion")
        source = repository.models()["m"]
        assert source.fingerprint() != before
        assert tree_of(stage(source).directory)["1/model.onnx"] == b"new"


def test_pages_are_followed_and_a_look_is_two_requests(place: RegistryPlace) -> None:
    for number in range(25):
        place.registry.register(f"m{number}", onnx_files(), "champion")
    with place.opened() as repository:
        repository.models()
        before = place.proxy.count()
        assert len(repository.models()) == 25
        assert place.proxy.count() - before == 2
        place.registry.most = 10
        assert len(repository.models()) == 25
        assert place.proxy.count(SEARCH) >= 3


def test_a_page_that_is_too_large_is_refused(place: RegistryPlace) -> None:
    place.registry.register("m", onnx_files(), "champion")
    with place.opened() as repository:
        repository.models()
        place.registry.models["m"].tags["notes"] = "x" * MOST_JSON
        with pytest.raises(OSError, match=f"{SEARCH}.* has more than {MOST_JSON} bytes"):
            repository.models()


def test_other_threads_get_turns_while_a_listing_is_decoded() -> None:
    """A thread can lose the GIL where a Python function is called, and not within the decoder."""
    listing = {"registered_models": [{"tags": [{"key": "k", "value": "v"}] * 3}] * 10}
    calls: list[str] = []
    sys.setprofile(lambda frame, event, argument: calls.append(event))
    try:
        found = decoded(json.dumps(listing).encode())
    finally:
        sys.setprofile(None)
    assert found == listing
    assert calls.count("call") > 40


def test_names_that_models_can_not_have(place: RegistryPlace, caplog: pytest.LogCaptureFixture) -> None:
    registry = place.registry
    for name in ("../up", "..", "a/b", "tab\tbed", "a::b", " m"):
        registry.register(name, onnx_files())
    registry.register("given name", onnx_files())
    registry.models["given name"].tags["conch.name"] = "given"
    registry.register("evil", onnx_files())
    registry.models["evil"].tags["conch.name"] = "../../etc"
    registry.register('it\'s "one"', onnx_files())
    with place.opened() as repository:
        for _ in range(2):
            assert served(repository) == {"given": [1], 'it\'s "one"': [1]}
        assert caplog.text.count("can't be the name of a model") == 7
        staged = stage(repository.models()["given"])
        assert staged.directory.name == "given" and place.cache in staged.directory.parents


def test_a_tag_takes_no_name_that_another_model_has(
    place: RegistryPlace, caplog: pytest.LogCaptureFixture
) -> None:
    registry = place.registry
    for name in ("unserved", "late", "victim", "old"):
        registry.register(name, onnx_files(), status="FAILED_REGISTRATION" if name == "unserved" else "READY")
    tags = {name: model.tags for name, model in registry.models.items()}
    with place.opened() as repository:
        assert served(repository) == {"late": [1], "victim": [1], "old": [1]}
        tags["late"]["conch.name"] = "victim"
        assert served(repository) == {"victim": [1], "old": [1]}
        assert "'late': its tag conch.name is 'victim', which is the name of" in caplog.text
        tags["late"]["conch.name"] = "unserved"
        assert served(repository) == {"victim": [1], "old": [1]}
        # The name of a tag stays with the model that has it, also if an older one claims it.
        tags["victim"]["conch.name"] = "given"
        assert served(repository) == {"given": [1], "old": [1]}
        tags["late"]["conch.name"] = "given"
        models = repository.models()
        assert sorted(models) == ["given", "old"] and models["given"].location.endswith("/victim")
    with place.opened() as repository:
        assert served(repository) == {"old": [1]}
        assert "2 registered models are named 'given'" in caplog.text


@pytest.mark.parametrize("path", ["../escaped", "a/../../escaped", "a//b", "a/\0", ".."])
def test_artifacts_can_not_leave_their_directory(place: RegistryPlace, path: str) -> None:
    place.registry.register("m", {**onnx_files(), path: b"x"})
    with place.opened() as repository, pytest.raises(OSError, match="can't be the name of a file"):
        stage(repository.models()["m"])
    assert not list(place.cache.parent.rglob("escaped"))


def test_a_model_is_staged_as_its_flavor_says(place: RegistryPlace) -> None:
    place.registry.register("m", onnx_files(b"one"), "champion")
    place.registry.register("m", onnx_files(b"two"), "challenger")
    with place.opened() as repository:
        source = repository.models()["m"]
        told = Told()
        staged = stage(source, told)
        files = tree_of(staged.directory)
        config = files.pop("config.pbtxt")
        assert files == {"1/model.onnx": b"one", "2/model.onnx": b"two"}
        assert b"onnxruntime" in config and config == source.read("config.pbtxt")
        assert staged.fingerprint == source.fingerprint()
        assert told.steps[-1][0] == told.steps[-1][1]
        with pytest.raises(FileNotFoundError):
            source.read("nothing")
        asked = place.proxy.count()
        assert stage(source).directory == staged.directory
        assert place.proxy.count() == asked


def test_a_cached_artifact_is_not_fetched_again(place: RegistryPlace) -> None:
    place.registry.register("m", onnx_files(os.urandom(1000)), "champion")
    for _ in range(2):
        with place.opened() as repository:
            stage(repository.models()["m"])
    assert place.proxy.count("model.onnx") == 1
    assert place.proxy.count("artifacts/MLmodel") == 1


@pytest.mark.parametrize("ranges", [True, False])
def test_a_fetch_that_was_cut_off_goes_on(place: RegistryPlace, ranges: bool) -> None:
    content = os.urandom((9 << 20) + 17)
    place.registry.ranges = ranges
    place.registry.register("m", onnx_files(content))
    with place.opened() as repository:
        source = repository.models()["m"]
        place.proxy.fail(Fault.DROP, 1, "model.onnx")
        assert tree_of(stage(source).directory)["1/model.onnx"] == content
    starts = [seen.range for seen in place.proxy.seen if seen.path.endswith("model.onnx")]
    # One request while nothing fails: the server may fetch the whole file from elsewhere for each.
    assert starts[0] == "" and 2 <= len(starts) <= 3, starts


def test_a_fetch_that_failed_goes_on_in_the_next_server(place: RegistryPlace) -> None:
    content = os.urandom((9 << 20) + 17)
    place.registry.register("m", onnx_files(content))
    calls = [0]

    def choose(seen: Seen) -> Fault | None:
        if not seen.path.endswith("model.onnx"):
            return None
        calls[0] += 1
        return Fault.DROP if calls[0] == 1 else Fault.BUSY

    def fail(timeout_s: float) -> bool:
        """Fetches a part; False if the time was over before that."""
        with place.opened(timeout_s=timeout_s) as repository, pytest.raises(OSError) as raised:
            stage(repository.models()["m"])
        return "answers 503" in str(raised.value)

    place.proxy.choose = choose
    given_time(fail, 1)
    place.proxy.heal()
    with place.opened() as repository:
        assert tree_of(stage(repository.models()["m"]).directory)["1/model.onnx"] == content
    last = place.proxy.seen[-1]
    assert last.path.endswith("model.onnx") and last.range.startswith("bytes=")


def test_a_truncated_artifact_fails_the_load(place: RegistryPlace) -> None:
    place.registry.register("m", onnx_files(os.urandom(100)))
    place.proxy.fail(Fault.TRUNCATE, path="model.onnx")
    with place.opened() as repository, pytest.raises(OSError, match="ends early: 50 of 100 bytes"):
        stage(repository.models()["m"])


def test_artifacts_that_only_the_server_can_read(place: RegistryPlace) -> None:
    place.registry.elsewhere = "file:///srv/mlflow"
    place.registry.register(
        "a model", triton_files({"1/deep/er/x": b"deep", "config.pbtxt": b'backend: "fil"'})
    )
    with place.opened() as repository:
        files = tree_of(stage(repository.models()["a model"]).directory)
        assert files == {
            "1/deep/er/x": b"deep",
            "config.pbtxt": b'backend: "fil"\nversion_policy { all { } }\n',
        }


@pytest.mark.process
def test_artifacts_in_an_object_store_are_read_from_there(
    place: RegistryPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = os.urandom((5 << 20) + 17)
    version = place.registry.register("m", triton_files({"1/deep/model.onnx": content}))
    with s3_emulator() as s3:
        for name, value in s3.environment().items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{s3.port}")
        bucket = s3.bucket("artifacts")
        for path, data in version.files.items():
            bucket.put(f"mlflow/models/{version.id}/artifacts/{path}", data)
        place.registry.elsewhere = "s3://artifacts/mlflow"
        with place.opened(allow_code=True) as repository:
            staged = stage(repository.models()["m"])
            assert tree_of(staged.directory) == {"1/deep/model.onnx": content}
    assert not place.proxy.count("artifacts/")
    place.registry.elsewhere = "s3://artifacts/../up"
    with place.opened() as repository, pytest.raises(OSError, match=r"must not hold '\.' or '\.\.'"):
        stage(repository.models()["m"])


def test_credentials_are_sent_and_hidden(place: RegistryPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = place.registry
    registry.register("m", onnx_files())
    registry.authorization = "Bearer hush-hush"
    with place.opened() as repository, pytest.raises(InvalidArgumentError, match="MLFLOW_TRACKING_TOKEN"):
        repository.check()
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "hush-hush")
    with place.opened() as repository:
        repository.check()
        assert tree_of(stage(repository.models()["m"]).directory)["1/model.onnx"] == b"onnx"
        # The next look reads the variables again.
        registry.authorization = f"Basic {base64.b64encode(b'me:secret').decode()}"
        with pytest.raises(PermissionError, match="refuses the credentials") as caught:
            repository.models()
        assert "hush" not in str(caught.value)
        monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "me")
        monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "secret")
        assert served(repository) == {"m": [1]}


@pytest.mark.slow
def test_a_registry_that_does_not_answer(place: RegistryPlace) -> None:
    place.registry.register("m", onnx_files())

    def fails(text: str, timeout_s: float) -> bool:
        """Asks a registry in vain; False if the time was over before it failed."""
        with place.opened(timeout_s=timeout_s) as repository:
            with pytest.raises(OSError) as read:
                repository.models()
            with pytest.raises(UnavailableError) as checked:
                repository.check()
        return text in str(read.value) and text in str(checked.value)

    with place.opened() as repository:
        known = repository.models()
        place.proxy.fail(Fault.BUSY, 2)
        assert repository.models().keys() == known.keys()  # tried again
        for fault, text in (
            (Fault.BUSY, "answers 503"),
            (Fault.HANG, "no answer within"),
            (Fault.DROP, "ended"),
        ):
            place.proxy.fail(fault)
            given_time(partial(fails, text), 1.5)
            place.proxy.heal()
        assert tree_of(stage(known["m"]).directory)["1/model.onnx"] == b"onnx"


def test_a_server_that_is_no_registry(place: RegistryPlace) -> None:
    with place.opened() as repository:
        place.registry.answer = lambda path, query: b"<html>"  # type: ignore[method-assign]
        with pytest.raises(InvalidArgumentError, match=r"does not answer .* with JSON"):
            repository.check()
        for wrong in ({"registered_models": [{"nam": "m"}]}, {"registered_models": "m"}):
            place.registry.answer = lambda path, query, wrong=wrong: wrong  # type: ignore[method-assign, misc]
            with pytest.raises(OSError, match=r"MLflow does not write|no list"):
                repository.models()


def test_a_model_that_can_not_be_served_says_why(place: RegistryPlace) -> None:
    pyfunc = {
        "MLmodel": mlmodel({"python_function": {"loader_module": "mine"}}),
        "requirements.txt": b"mlflow",
    }
    place.registry.register("code", pyfunc)
    place.registry.register("none", {"README": b""})
    place.registry.register("mixed", onnx_files(), "champion")
    place.registry.register("mixed", triton_files({"1/xgboost.json": b"{}"}), "challenger")
    with place.opened() as repository:
        models = repository.models()
        for name, text in (
            ("code", "model 'code': version 1: only Python code of its own .* --mlflow-allow-code is off"),
            ("none", "version 1: its artifact has no MLmodel"),
            ("mixed", "versions 1 and 2 need different configs"),
        ):
            with pytest.raises(OSError, match=text):
                stage(models[name])


def test_the_cache_must_be_usable(place: RegistryPlace, tmp_path: Path) -> None:
    place.cache = tmp_path / "file"
    place.cache.write_text("no directory")
    with place.opened() as repository, pytest.raises(InvalidArgumentError, match="--model-cache-directory"):
        repository.check()
