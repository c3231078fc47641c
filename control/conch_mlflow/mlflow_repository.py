"""An MLflow registry as a model repository.

A registered model is a model, its versions are version directories. A listing asks the registry for its
models with their aliases; the artifact of a version is listed when its model is first read or staged, and
only once, as versions do not change. A model's fingerprint has an entry for each version that is served.

Owns: the connection and the cache. Threads: any. Locks: `_lock` guards what is known of versions.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from google.protobuf import text_format

from conch.core.errors import InvalidArgumentError, UnavailableError
from conch.protocol.model_config_pb2 import ModelConfig
from conch_control.repository.layout import CONFIG_FILE, Fingerprint
from conch_control.repository.source import ModelSource, Progress
from conch_mlflow.flavors import (
    CHECKED_BACKENDS,
    DATA_ONLY,
    MLMODEL,
    Artifact,
    FlavorError,
    VersionPlan,
    parse_yaml,
    plan_version,
)
from conch_mlflow.locations import MlflowCredentials, MlflowEnvironment, MlflowLocation
from conch_mlflow.registry import (
    FLAVOR_TAG,
    NAME_TAG,
    READY,
    ROLLOUT_TAG,
    SERVE_TAG,
    MalformedError,
    RegisteredModel,
    RegisteredVersion,
    can_be_label,
    newest_ready,
    parse_model,
    parse_version,
    quoted,
    wanted_aliases,
)
from conch_mlflow.registry_store import RegistryStore, UnreadableError, generated, open_registry, root_of
from conch_stores.cache import ModelCache
from conch_stores.connection import Connection, StoreTimeouts
from conch_stores.credentials import CredentialReader
from conch_stores.stager import StagedModel, Stager
from conch_stores.stores import Contents, StoreBusyError, StoredObject, is_safe

log = logging.getLogger(__name__)

_PAGE = "200"
_MOST_PAGES = 1000
_AT_ONCE = 8
_SMALL = 1 << 20
_FILTER = f"tags.`{SERVE_TAG}` = 'true'"


@dataclass(frozen=True, slots=True)
class ServedVersion:
    """A version to serve; `flavor` is that of its tag, empty for none."""

    number: int
    source: str
    identity: str
    flavor: str = ""

    @property
    def key(self) -> str:
        """Changes with what is staged."""
        return f"{self.identity} {self.flavor}".rstrip()


@dataclass(frozen=True, slots=True)
class StatedContents(Contents):
    """The content of a model, with the fingerprint of its listing."""

    state: Fingerprint = ()

    @property
    def fingerprint(self) -> Fingerprint:
        """Fingerprint of the model."""
        return self.state


class MlflowRepository:
    """An MLflow server; a `Repository`.

    Args:
        location: Its location.
        environment: Credentials for it.
        cache: Cache in which files are staged.
        timeouts: Limits of requests.
        allow_code: True if models may run Python code of their own.
    """

    def __init__(
        self,
        location: MlflowLocation,
        environment: MlflowEnvironment,
        cache: ModelCache,
        timeouts: StoreTimeouts,
        allow_code: bool,
    ) -> None:
        self._made: dict[str, bytes] = {}  # contents of generated files, by digest
        stores = CredentialReader(os.environ)

        async def opened(
            place: MlflowLocation, credentials: MlflowCredentials, silence_s: float
        ) -> RegistryStore:
            return await open_registry(place, credentials, silence_s, self._made, stores)

        self._connection = Connection(location, opened, environment, timeouts)
        self._cache = cache
        self._allow_code = allow_code
        self._stager = Stager(self._connection, cache)
        self._lock = threading.Lock()  # guards the next attributes
        self._details: dict[tuple[str, tuple[int, int], int], RegisteredVersion] = {}
        self._held: dict[str, dict[str, RegisteredVersion]] = {}  # last served version by model and alias
        self._plans: dict[tuple[str, str], VersionPlan] = {}
        self._owners: dict[str, str] = {}  # registered model by the name that it is served under
        self._reported: set[str] = set()

    @property
    def location(self) -> str:
        """The URL as given."""
        return self._connection.location.text

    @property
    def models_location(self) -> str:
        """The URL without a query."""
        return self._connection.location.models

    def check(self) -> None:
        """Checks access to the registry and write access to the cache.

        Raises:
            InvalidArgumentError: It is no MLflow server, or refuses the credentials.
            UnavailableError: It does not answer.
        """
        try:
            self._cache.open()
        except OSError as error:
            raise InvalidArgumentError(
                f"--model-cache-directory: '{self._cache.directory}' can't be used: {error.strerror or error}"
            ) from None
        try:
            self._ask("registered-models/search", max_results="1")
        except StoreBusyError as error:
            raise UnavailableError(str(error)) from None
        except OSError as error:
            raise InvalidArgumentError(str(error)) from None

    def models(self) -> Mapping[str, ModelSource]:
        """Lists the registered models that have a version to serve. Raises OSError: it does not answer."""
        registered = [
            parse_model(each)
            for each in self._pages("registered-models/search", "registered_models", max_results=_PAGE)
        ]
        tagged: dict[str, list[RegisteredVersion]] = {}
        for each in self._pages("model-versions/search", "model_versions", filter=_FILTER, max_results=_PAGE):
            tagged.setdefault(str(each.get("name")), []).append(parse_version(each))
        found = self._described(registered)
        models: dict[str, ModelSource] = {}
        for model, name in self._named(registered):
            followed = self._followed(model, found)
            served = self._served(model, followed, tagged.get(model.name, ()))
            if served:
                labels = self._labels(model, followed, served)
                rollout = model.tags.get(ROLLOUT_TAG)
                data_only = "" if self._allow_code else DATA_ONLY
                models[name] = MlflowModel(self, name, model.name, tuple(served), labels, rollout, data_only)
        self._forget(registered, models.values())
        return models

    def close(self) -> None:
        """Cancels transfers and closes the cache."""
        self._connection.close()
        self._cache.close()

    def stage(self, model: MlflowModel, progress: Progress, cancelled: Callable[[], bool]) -> StagedModel:
        """Fetches a model's files into the cache; see `ModelSource.stage`."""
        return self._stager.stage(model.name, lambda: self.contents(model), progress, cancelled)

    def read(self, model: MlflowModel, path: str) -> bytes:
        """Content of a small file; see `ModelSource.read`."""
        contents = self.contents(model)
        item = contents.files.get(path)
        if item is None:
            raise FileNotFoundError(f"'{model.location}/{path}' does not exist")
        return self._read_small(item)

    def contents(self, model: MlflowModel) -> StatedContents:
        """The files of a model. Raises OSError: they can't be listed now."""
        files: dict[str, StoredObject] = {}
        plans = {
            each.number: self._plan(model, each) for each in sorted(model.versions, key=lambda v: -v.number)
        }
        newest = next(iter(plans.values()))
        problem = next((f"version {n}: {plan.problem}" for n, plan in plans.items() if plan.problem), "")
        for number, plan in plans.items():
            files |= {f"{number}/{path}": item for path, item in plan.files.items()}
            files |= {f"{number}/{path}": self._keep(data) for path, data in plan.made.items()}
            problem = problem or _difference(newest.config, plan.config, max(plans), number)
        files |= newest.shared
        if newest.config:
            files[CONFIG_FILE] = self._keep(newest.config)
        directories = {str(number) for number in plans}
        for path in files:
            parts = path.split("/")
            directories.update("/".join(parts[:count]) for count in range(1, len(parts)))
        return StatedContents(files, frozenset(directories), problem, model.fingerprint())

    def _followed(
        self, model: RegisteredModel, found: Mapping[tuple[str, int], RegisteredVersion]
    ) -> dict[str, RegisteredVersion]:
        """The versions of aliases; one that is not ready is the last one that was."""
        aliases = wanted_aliases(model, self._connection.location.aliases)
        with self._lock:
            held = self._held.get(model.name, {})
        now: dict[str, RegisteredVersion] = {}
        for alias, number in aliases.items():
            each = found.get((model.name, number))
            if each is None or each.status != READY:
                each = held.get(alias)
            if each is not None:
                now[alias] = each
        with self._lock:
            self._held[model.name] = now
        return now

    def _served(
        self,
        model: RegisteredModel,
        followed: Mapping[str, RegisteredVersion],
        tagged: Iterable[RegisteredVersion],
    ) -> list[ServedVersion]:
        """The versions to serve."""
        versions = {each.number: each for each in tagged if each.status == READY}
        versions |= {each.number: each for each in followed.values()}
        if not (versions or model.aliases or self._connection.location.aliases):
            found = (model.in_production(), self._newest(model))
            versions = {each.number: each for each in found if each is not None}
        tag = model.tags.get(FLAVOR_TAG, "")
        return [
            ServedVersion(each.number, each.source, each.identity, each.tags.get(FLAVOR_TAG, tag))
            for _, each in sorted(versions.items())
        ]

    def _labels(
        self,
        model: RegisteredModel,
        followed: Mapping[str, RegisteredVersion],
        served: Iterable[ServedVersion],
    ) -> dict[str, int]:
        labels = model.labels(
            {alias: each.number for alias, each in followed.items()},
            {each.number for each in served},
            self._connection.location.stable,
        )
        for alias in labels:
            if not can_be_label(alias):
                self._report(
                    f"alias '{alias}' of registered model {model.name!r} can't be a label, which begins with "
                    f"a letter and has at most 64 characters: requests can't name a version by it"
                )
        return {alias: number for alias, number in labels.items() if can_be_label(alias)}

    def _newest(self, model: RegisteredModel) -> RegisteredVersion | None:
        """The newest version that is ready; the listing has only the newest one of each stage."""
        known = newest_ready(model.latest)
        if not model.latest or known == max(model.latest, key=lambda each: each.number):
            return known
        name = quoted(model.name)
        if not name:
            return known
        page = self._ask(
            "model-versions/search", filter=f"name={name}", order_by="version_number DESC", max_results="100"
        )
        return newest_ready(map(parse_version, page.get("model_versions", ()))) or known

    def _described(self, models: Iterable[RegisteredModel]) -> dict[tuple[str, int], RegisteredVersion]:
        """The versions that aliases name, which the listing does not describe unless they are the newest."""
        found: dict[tuple[str, int], RegisteredVersion] = {}
        missing: list[tuple[RegisteredModel, int]] = []
        for model in models:
            known = model.known()
            for number in set(wanted_aliases(model, self._connection.location.aliases).values()):
                with self._lock:
                    each = known.get(number) or self._details.get((model.name, model.stamp, number))
                if each is None:
                    missing.append((model, number))
                else:
                    found[model.name, number] = each
        if missing:
            with ThreadPoolExecutor(_AT_ONCE, "conch-mlflow-list") as pool:
                for (model, number), each in zip(missing, pool.map(self._version, missing), strict=True):
                    if each is not None:
                        found[model.name, number] = each
                        if each.status == READY:
                            with self._lock:
                                self._details[model.name, model.stamp, number] = each
        return found

    def _version(self, wanted: tuple[RegisteredModel, int]) -> RegisteredVersion | None:
        model, number = wanted
        try:
            found = self._ask("model-versions/get", name=model.name, version=str(number))
        except FileNotFoundError:
            return None  # deleted since the listing
        return parse_version(found.get("model_version"))

    def _plan(self, model: MlflowModel, version: ServedVersion) -> VersionPlan:
        key = (model.registered, version.key)
        with self._lock:
            plan = self._plans.get(key)
        if plan is None:
            plan = self._planned(model, version)
            with self._lock:
                self._plans[key] = plan
        return plan

    def _planned(self, model: MlflowModel, version: ServedVersion) -> VersionPlan:
        number = str(version.number)
        answer = self._ask("model-versions/get-download-uri", name=model.registered, version=number)
        uri = str(answer.get("artifact_uri", ""))
        try:
            root = root_of(uri, model.registered, version.number, version.source)
        except UnreadableError as error:
            return VersionPlan(problem=str(error))
        items = self._connection.call(lambda store: store.list(root))
        start = len(root) + 1
        # A path that is written again, such as by a run, is another content.
        files = {
            each.path[start:]: replace(each, identity=f"{version.identity} {each.identity}") for each in items
        }
        if not all(is_safe(part) for path in files for part in path.split("/")):
            return VersionPlan(problem="its artifact has names that can't be those of files")
        if MLMODEL not in files:
            return VersionPlan(problem=f"its artifact has no {MLMODEL}")
        try:
            text = Artifact({}, files, self._read_part).text(MLMODEL)
            artifact = Artifact(parse_yaml(text, MLMODEL), files, self._read_part)
        except FlavorError as error:
            return VersionPlan(problem=str(error))
        return plan_version(artifact, version.flavor, self._allow_code)

    def _read_part(self, item: StoredObject, start: int, end: int) -> bytes:
        if start == 0 and end == item.size:
            return self._read_small(item)
        content = self._connection.call(
            lambda store: store.read(item.path, start, end), self._connection.timeouts.block_s
        )
        return content

    def _read_small(self, item: StoredObject) -> bytes:
        """A whole file, from the cache if it is there."""
        if item.size == 0:
            return b""
        self._cache.open()
        blob = self._stager.blob(item)
        content = self._cache.find(blob)
        if content is None:
            content = self._connection.call(
                lambda store: store.read(item.path, 0, item.size), self._connection.timeouts.block_s
            )
            if len(content) != item.size:
                raise OSError(f"model repository '{self.location}': '{item.path}' is cut off")
            if item.size <= _SMALL:
                self._cache.keep(blob, content)
        return content

    def _keep(self, content: bytes) -> StoredObject:
        digest = hashlib.sha256(content).hexdigest()
        self._made[digest] = content
        return generated(digest, len(content))

    def _named(self, registered: Collection[RegisteredModel]) -> Iterable[tuple[RegisteredModel, str]]:
        """The models with the names to serve them under; without those that have none.

        All who may register some model can write a tag. So it takes neither the name of a registered
        model, whether that is served or not, nor a name that another model has by its tag. Of models that
        claim one name when the server first sees them, none gets it.
        """
        claims: dict[str, list[str]] = {}
        for model in registered:
            claims.setdefault(model.tags.get(NAME_TAG, model.name), []).append(model.name)
        names = {model.name for model in registered}
        with self._lock:
            held = self._owners
        owners: dict[str, str] = {}
        for name, claimants in claims.items():
            if name in names:
                owners[name] = name
            elif len(claimants) == 1:
                owners[name] = claimants[0]
            elif held.get(name) in claimants:
                owners[name] = held[name]
        with self._lock:
            self._owners = owners
        for model in registered:
            name = model.tags.get(NAME_TAG, model.name)
            owner = owners.get(name)
            if not (is_safe(name) and name.isprintable() and name.strip() == name and "::" not in name):
                self._report(
                    f"ignoring registered model {model.name!r}: '{name!r}' can't be the name of a model; "
                    f"give it one by tag {NAME_TAG}"
                )
            elif owner is None:
                self._report(
                    f"{len(claims[name])} registered models are named '{name}', by tag {NAME_TAG}; none of "
                    f"them is served"
                )
            elif owner != model.name:
                self._report(
                    f"ignoring registered model {model.name!r}: its tag {NAME_TAG} is '{name}', which is the "
                    f"name of registered model {owner!r}; give it another one"
                )
            else:
                yield model, name

    def _report(self, text: str) -> None:
        """Logs an error once."""
        with self._lock:
            if text in self._reported:
                return
            self._reported.add(text)
        log.error("model repository '%s': %s", self.location, text)

    def _forget(self, registered: Iterable[RegisteredModel], models: Iterable[ModelSource]) -> None:
        """Drops the state of versions that were removed."""
        stamps = {(each.name, each.stamp) for each in registered}
        names = {name for name, _ in stamps}
        keys = {
            (model.registered, version.key)
            for model in models
            if isinstance(model, MlflowModel)
            for version in model.versions
        }
        with self._lock:
            self._details = {key: each for key, each in self._details.items() if key[:2] in stamps}
            self._held = {name: each for name, each in self._held.items() if name in names}
            self._plans = {key: plan for key, plan in self._plans.items() if key in keys}

    def _pages(self, method: str, key: str, **query: str) -> Iterable[Mapping[str, Any]]:
        """The entries of all pages."""
        token = ""
        for _ in range(_MOST_PAGES):
            page = self._ask(method, **query, **({"page_token": token} if token else {}))
            entries = page.get(key, [])
            if not isinstance(entries, list) or not all(isinstance(each, dict) for each in entries):
                raise MalformedError(f"model repository '{self.location}': it answers {method} with no list")
            yield from entries
            token = str(page.get("next_page_token", ""))
            if not token:
                return
        raise MalformedError(
            f"model repository '{self.location}': {method} has more than {_MOST_PAGES} pages"
        )

    def _ask(self, method: str, **query: str) -> dict[str, Any]:
        return self._connection.call(lambda store: store.ask(method, **query))


class MlflowModel:
    """A registered model; a `ModelSource`.

    Attributes:
        name: The name that it is served under.
        registered: Its name in the registry.
        versions: Versions to serve, at least one.
        renamed: Its artifact's config may have another name.
        data_only, checked_backends: See `DataOnly`.
    """

    renamed = True
    checked_backends: Collection[str] = CHECKED_BACKENDS

    def __init__(
        self,
        repository: MlflowRepository,
        name: str,
        registered: str,
        versions: tuple[ServedVersion, ...],
        labels: Mapping[str, int],
        rollout: str | None,
        data_only: str,
    ) -> None:
        self._repository = repository
        self._labels = labels
        self._rollout = rollout
        self.data_only = data_only
        self.name = name
        self.registered = registered
        self.versions = versions

    @property
    def location(self) -> str:
        """URL of the registry, with the model's name."""
        return f"{self._repository.models_location}/{self.registered}"

    def labels(self) -> Mapping[str, int]:
        """The versions that aliases name, ``production`` and ``stable``; see `Labelled`."""
        return self._labels

    def rollout_declaration(self) -> str | None:
        """The text of tag ``conch.rollout``; see `Declared`."""
        return self._rollout

    def fingerprint(self) -> Fingerprint:
        """The versions to serve, at the listing; a version's content does not change."""
        return tuple((f"{each.number}/", 0, 0, each.key) for each in self.versions)

    def listed_fingerprint(self) -> Fingerprint:
        """As `fingerprint`."""
        return self.fingerprint()

    def read(self, path: str) -> bytes:
        """Content of a small file.

        Raises:
            FileNotFoundError: There is none.
            OSError: It can't be read now.
        """
        return self._repository.read(self, path)

    def stage(self, progress: Progress, cancelled: Callable[[], bool]) -> StagedModel:
        """Fetches the model's files into the cache.

        Raises:
            OSError: They can't be fetched, or the model can't be served; partial data stays for a retry.
            CancelledError: `cancelled` returned True.
        """
        return self._repository.stage(self, progress, cancelled)


def _difference(newest: bytes, other: bytes, newest_number: int, number: int) -> str:
    """Reason for which two versions can't be versions of one model; empty if they can."""
    if newest == other:
        return ""
    first, second = ModelConfig(), ModelConfig()
    text_format.Parse(newest.decode(), first)
    text_format.Parse(other.decode(), second)
    for field in ModelConfig.DESCRIPTOR.fields:
        if getattr(first, field.name) != getattr(second, field.name):
            return (
                f"versions {number} and {newest_number} need different configs: '{field.name}' differs; "
                f"serve one of them, by ?alias=... of the repository"
            )
    return ""
