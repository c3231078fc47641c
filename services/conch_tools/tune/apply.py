"""Writes the config of a search's winner."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from conch_tools.tune.tune_file import TuneFile
from conch_tools.tune.variants import CONFIG, changed, config_text, digest_of, variant_text
from conch_tools.whole_files import write_whole

_BACKUP = f"{CONFIG}.before-tune"


class NotAppliedError(Exception):
    """There is no winner, or the model is another one."""


@dataclass(frozen=True, slots=True)
class Applied:
    """Files that were written.

    Attributes:
        config: The config's file.
        backup: The old one; None if there was none.
        dropped: Comments of the old one that are not in the new one.
    """

    config: Path
    backup: Path | None
    dropped: tuple[str, ...]


def apply_winner(file: TuneFile, repository: Path) -> Applied:
    """Writes the winner's config into a repository; keeps the old one, and those of earlier times.

    Raises:
        NotAppliedError: There is no winner, or the model is not the one that was measured.
        ConchError: Its config is malformed.
    """
    winner = file.result.get("winner")
    if winner is None:
        raise NotAppliedError("the search has no winner to apply")
    model = repository / file.identity["model"]["name"]
    if not model.is_dir():
        raise NotAppliedError(f"'{repository}' has no model '{model.name}'")
    if digest_of(model) != file.identity["model"]["digest"]:
        raise NotAppliedError(f"'{model}' has changed since it was measured: tune it again")
    config, backup, text = model / CONFIG, None, config_text(model)
    new = variant_text(text, changed(winner, file.identity["today"]))
    if config.exists():
        backup = next(path for path in _backups(model) if not path.exists())
        backup.write_text(text)
    write_whole(config, new.text)
    return Applied(config, backup, new.dropped)


def _backups(model: Path) -> Iterator[Path]:
    yield model / _BACKUP
    number = 2
    while True:
        yield model / f"{_BACKUP}-{number}"
        number += 1
