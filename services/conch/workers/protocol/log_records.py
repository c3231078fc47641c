"""What a worker has logged, in the server's log."""

from __future__ import annotations

import logging
from typing import Any

from conch.workers.protocol.wire import WireError

_MODELS = "conch.python_model"
_OURS = "conch."


class WorkerLog:
    """The log of one worker.

    Args:
        model: The name of its model, under which its records appear.
    """

    def __init__(self, model: str) -> None:
        self._log = logging.getLogger(f"{_MODELS}.{model}")
        self._sent = -1

    @property
    def level(self) -> int:
        """From which level on the server logs what models say; the worker is to send no other records."""
        self._sent = self._log.getEffectiveLevel()
        return self._sent

    @property
    def changed(self) -> bool:
        """Whether that has changed since it was last asked for."""
        return self._log.getEffectiveLevel() != self._sent

    def handle(self, fields: dict[str, Any]) -> None:
        """Logs a record.

        Raises:
            WireError: It is none.
        """
        name, level, text = fields.get("name"), fields.get("level"), fields.get("text")
        file, line, function = fields.get("file"), fields.get("line"), fields.get("function")
        if not (isinstance(name, str) and isinstance(level, int) and isinstance(text, str)):
            raise WireError("a record of the log has a name, a level and a text")
        if not (isinstance(file, str) and isinstance(line, int)):
            raise WireError("a record of the log has a file and a line")
        target = self._target(name)
        if target.isEnabledFor(level):
            where = function if isinstance(function, str) else None
            target.handle(target.makeRecord(target.name, level, file, line, "%s", (text,), None, where))

    def _target(self, name: str) -> logging.Logger:
        """Our code's own log, or the nearest above it that is here too: a model may make up many names."""
        if name.startswith(_OURS) and not name.startswith(_MODELS):
            while "." in name:
                if name in logging.Logger.manager.loggerDict:
                    return logging.getLogger(name)
                name = name.rpartition(".")[0]
        return self._log
