"""What a worker logs goes to the server, with the place where it was logged."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable

from conch.workers.connection.packet_channel import ChannelClosedError
from conch.workers.protocol import wire


class ServerHandler(logging.Handler):
    """Sends records to the server.

    Args:
        send: Sends the fields of a record, as JSON.
    """

    def __init__(self, send: Callable[[bytes], None]) -> None:
        super().__init__()
        self._send = send
        self._pid = os.getpid()
        self._format = logging.Formatter()

    def emit(self, record: logging.LogRecord) -> None:
        """Sends a record."""
        text = ""
        try:
            text = record.getMessage()
            if record.exc_info:
                text = f"{text}\n{self._format.formatException(record.exc_info)}"
            if record.stack_info:
                text = f"{text}\n{record.stack_info}"
            fields = {
                "name": record.name,
                "level": record.levelno,
                "text": text,
                "file": record.pathname,
                "line": record.lineno,
                "function": record.funcName,
            }
            self._send(wire.encode_json(fields))
        except ChannelClosedError:
            # Nobody reads the log any more; or this is a process that the model has forked, whose output is
            # the worker's.
            if os.getpid() != self._pid:
                sys.stderr.write(f"{record.levelname} {text}\n")
        except Exception:  # a record that can't be formatted is the model's fault, not ours
            self.handleError(record)


def log_to_server(send: Callable[[bytes], None], level: int) -> None:
    """Has everything that is logged in this process sent, from a level on."""
    root = logging.getLogger()
    root.addHandler(ServerHandler(send))
    root.setLevel(level)
