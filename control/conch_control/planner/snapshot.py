"""Takes snapshots of the repositories for the plan.

Owns: the last state of each model, to avoid reading configs twice. Threads: the planner's only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import replace

from conch.core.errors import ConchError
from conch_control.control_options import ControlOptions
from conch_control.planner.plan import FoundModel, Snapshot
from conch_control.repository.dependency_graph import read_composing_models
from conch_control.repository.layout import INCOMPLETE, is_incomplete, split_markers, without_editor_files
from conch_control.repository.local import LocalModel
from conch_control.repository.namespaces import unwrapped
from conch_control.repository.repositories import Repositories
from conch_control.repository.source import Declared, Labelled, Listed, ModelSource, Scan

log = logging.getLogger(__name__)


class SnapshotReader:
    """Polls repositories; calls `before` with each model before it reads its state.

    Models that are not `wanted` are left out; None for none.
    """

    def __init__(
        self,
        repositories: Repositories,
        options: ControlOptions,
        before: Callable[[ModelSource], None],
        on_late: Callable[[], None] = lambda: None,
        editors: bool = False,
        wanted: Callable[[str], bool] | None = None,
    ) -> None:
        self._wanted = wanted
        self._editors = editors
        self._repositories = repositories
        self._options = options
        self._before = before
        self._on_late = on_late
        self._known: dict[str, FoundModel] = {}
        self._identifiers: Mapping[str, tuple[str, ...]] = {}
        self._reported: set[tuple[str, str]] = set()

    def poll(self, names: Collection[str] | None, cancelled: Callable[[], bool]) -> Snapshot:
        """Polls all repositories without waiting for slow ones.

        Reads the state of new models and of those in `names`; None for all.
        """
        return self._take_snapshot(self._repositories.poll(self._on_late), names, cancelled)

    def poll_late(self, cancelled: Callable[[], bool]) -> Snapshot:
        """The models of repositories that answered after their timeout."""
        return self._take_snapshot(self._repositories.late(), None, cancelled)

    def poll_all(self, cancelled: Callable[[], bool]) -> Snapshot:
        """Polls all models and waits for slow repositories."""
        return self._take_snapshot(self._repositories.scan(), None, cancelled)

    def _take_snapshot(
        self, scan: Scan, names: Collection[str] | None, cancelled: Callable[[], bool]
    ) -> Snapshot:
        if self._wanted is not None:
            wanted_models = {name: source for name, source in scan.models.items() if self._wanted(name)}
            scan = replace(
                scan, models=wanted_models, duplicates=frozenset(filter(self._wanted, scan.duplicates))
            )
        if scan.identifiers != self._identifiers:  # names in configs may now mean other models
            names, self._identifiers = None, scan.identifiers
        models: dict[str, FoundModel | None] = dict.fromkeys(scan.duplicates)
        for name in scan.duplicates:
            self._report(
                name,
                scan.duplicates,
                "failed to poll model '%s': not unique across all model repositories",
            )
        failed = bool(scan.unreadable)
        for name, source in scan.models.items():
            if cancelled():
                return Snapshot({}, partial=True)
            wanted = names is None or name in names or name not in self._known
            found = models[name] = self._found(source) if wanted else None
            failed = failed or (wanted and found is None)
        if not scan.unreadable:
            for name in self._known.keys() - models.keys():
                del self._known[name]
            self._reported = {(name, text) for name, text in self._reported if name in models}
        return Snapshot(models, bool(scan.unreadable), failed, scan.age_ns, scan.duplicates)

    def _found(self, source: ModelSource) -> FoundModel | None:
        name = source.name
        try:
            self._before(source)
            # Use the listing: asking for each model is slow and may hang.
            state, markers = split_markers(
                source.listed_fingerprint() if isinstance(source, Listed) else source.fingerprint()
            )
        except (ConchError, OSError) as error:
            reason = error.message if isinstance(error, ConchError) else error
            log.warning("can't see whether model '%s' in %s has changed: %s", name, source.location, reason)
            return None
        if self._editors:
            state = without_editor_files(state)
        known, beside = self._known.get(name), _beside(source)
        if known is not None and known.fingerprint == state and known.location == source.location:
            same = (known.markers, known.beside) == (markers, beside)
            found = known if same else replace(known, markers=markers, beside=beside)
        else:
            parts = read_composing_models(source, self._options)
            found = FoundModel(state, markers, source.location, parts, beside)
        self._known[name] = found
        self._report(
            name,
            {name} if is_incomplete(markers) else (),
            f"model '%s' is marked as incomplete by a file {INCOMPLETE}: changes wait until that is gone",
        )
        return found

    def _report(self, name: str, having: Collection[str], text: str) -> None:
        """Logs a warning about a model once while it lasts."""
        if name not in having:
            self._reported.discard((name, text))
        elif (name, text) not in self._reported:
            self._reported.add((name, text))
            log.warning(text, name)


def _beside(source: ModelSource) -> Hashable:
    """Labels and declaration of a model whose repository has labels."""
    model = unwrapped(source)
    # The first check is for speed: that of a protocol takes microseconds, for each model of each poll.
    if isinstance(model, LocalModel) or not isinstance(model, Labelled):
        return ()
    labels = tuple(sorted(model.labels().items()))
    rollout = model.rollout_declaration() if isinstance(model, Declared) else None
    return (labels, rollout) if labels or rollout is not None else ()
