"""The log: what a line looks like, what is left out, and what many of the same become."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.support.forked_logs import log_in_a_fork
from tests.support.servers import eventually

from conch.backends.python.api.pb_utils import Logger
from conch.ipc.worker_log import ServerHandler
from conch.observability.logging.log_handler import LogHandler, configure, unconfigure
from conch.observability.logging.log_settings import AccessLogOptions, LogControl, LogOptions
from conch.observability.logging.log_sinks import StreamSink
from conch.observability.logging.process_logs import LogFileError, open_logs
from conch.observability.logging.repeat_limit import WINDOW_NS

log = logging.getLogger("conch.test")


class Unprintable:
    """An object without text."""

    def __str__(self) -> str:
        raise ValueError

    __repr__ = __str__


class Output:
    """A log whose lines are kept, with a clock that is set by hand."""

    def __init__(self, **options: Any) -> None:
        self.now_ns = 0
        self.now: Callable[[], int] = lambda: self.now_ns
        self.options = LogOptions(**{"json": True, **options})
        self._stream = io.StringIO()
        as_json = self.options.json is True
        self.handler = LogHandler(self.options, StreamSink(self._stream), as_json, self.clock)

    def clock(self) -> int:
        return self.now()

    @property
    def written(self) -> str:
        """Text written so far, without waiting."""
        return self._stream.getvalue()

    @property
    def text(self) -> str:
        self.handler.flush()
        return self._stream.getvalue()

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.text.splitlines()]

    @property
    def messages(self) -> list[str]:
        return [line["message"] for line in self.lines]


@contextmanager
def logging_to(**options: Any) -> Iterator[Output]:
    output = Output(**options)
    logger = logging.getLogger("conch")
    propagates = logger.propagate
    logger.addHandler(output.handler)
    logger.propagate = False
    try:
        yield output
    finally:
        logger.removeHandler(output.handler)
        logger.propagate = propagates
        logger.setLevel(logging.NOTSET)
        output.handler.close()


def test_fields_of_a_json_line() -> None:
    with logging_to() as output:
        log.warning("model '%s' is %d", "mö\ndel", 1, extra={"model": "m"})
        (line,) = output.lines
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}\+00:00", line.pop("ts"))
    assert line == {
        "level": "warning",
        "logger": "conch.test",
        "message": "model 'mö\ndel' is 1",
        "model": "m",
    }


def test_the_traceback_of_an_exception() -> None:
    with logging_to() as output:
        try:
            raise ValueError("broken")
        except ValueError:
            log.exception("it failed")
        (line,) = output.lines
    assert line["level"] == "error"
    assert line["exception"].startswith("Traceback")
    assert line["exception"].endswith("ValueError: broken")


@pytest.mark.parametrize("as_json", [False, True])
def test_texts_of_any_size_are_cut(as_json: bool) -> None:
    sent: list[bytes] = []
    to_server = ServerHandler(sent.append)
    with logging_to(json=as_json) as output:
        log.addHandler(to_server)
        try:
            raise ValueError("x" * 4_000_000) from ValueError("y" * 4_000_000)
        except ValueError as error:
            log.exception("it failed: %s", error)
        log.removeHandler(to_server)
        texts = [output.text, sent[0].decode()]
    for text in texts:
        assert len(text) < 80_000
        assert "ValueError: yyyy" in text and text.count("more characters)") == 2


@pytest.mark.parametrize("breaking", "\n\r\v\f\x1b\x85\u2028")
def test_the_text_of_an_exception_forges_no_line(breaking: str) -> None:
    with logging_to(json=False) as output:
        try:
            raise ValueError(f"client's{breaking}I1122 00:00:00.000000 1 x.py:1] forged")
        except ValueError:
            log.exception("it failed")
    first, *rest = output.text.splitlines()
    assert first.endswith('"it failed"')
    assert all(line.startswith("    ") for line in rest)
    assert "\x1b" not in output.text


@pytest.mark.parametrize(
    ("form", "escape", "pattern"),
    [
        ("default", True, r'I\d{4} \d\d:\d\d:\d\d\.\d{6} PID test_log_handler\.py:\d+\] "one\\n\\"two\\""\n'),
        (
            "ISO8601",
            True,
            r'\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ I PID test_log_handler\.py:\d+\] "one\\n\\"two\\""\n',
        ),
        ("default", False, r'I\d{4} \d\d:\d\d:\d\d\.\d{6} PID test_log_handler\.py:\d+\] one\n"two"\n'),
    ],
)
def test_text_lines_are_tritons(form: str, escape: bool, pattern: str) -> None:
    with logging_to(json=False, format=form, escape=escape) as output:
        log.info('one\n"two"')
        assert re.fullmatch(pattern.replace("PID", str(os.getpid())), output.text), output.text


def test_settings_change_what_is_logged() -> None:
    with logging_to(json=False) as output:
        control = LogControl(output.options, output.handler.apply)

        def logged() -> str:
            before = len(output.text)
            for level in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR):
                log.log(level, logging.getLevelName(level))
            return "".join(re.findall(r'"([A-Z])', output.text[before:]))

        assert logged() == "IWE"
        control.update({"log_verbose_level": 1})
        assert logged() == "DIWE"
        control.update({"log_info": False, "log_error": False})
        assert logged() == "DW"
        control.update({"log_verbose_level": 0, "log_warning": False})
        assert logged() == ""
        control.update({"log_error": True, "log_format": "ISO8601"})
        assert logged() == "E"
        assert re.search(r"Z E \d+ test_log_handler", output.text)


def test_many_of_the_same_are_counted() -> None:
    with logging_to(repeat_limit=3) as output:
        for number in range(10):
            log.error("failed: %d", number, exc_info=ValueError("x"))
            log.warning("another place")
        expected = [text for number in range(3) for text in (f"failed: {number}", "another place")]
        assert output.messages == expected
        output.now_ns = WINDOW_NS
        summaries = output.lines[6:]
        assert [line["message"] for line in summaries] == [
            "... 7 more like this: failed: 3",
            "... 7 more like this: another place",
        ]
        assert [line["suppressed"] for line in summaries] == [7, 7]
        assert [line["level"] for line in summaries] == ["error", "warning"]
        assert "exception" not in summaries[0]
        log.error("other words")
        assert output.messages[8:] == ["other words"]


def test_the_count_comes_by_itself() -> None:
    """No further message is needed, nor a reader: the writing thread does it."""
    with logging_to(repeat_limit=1) as output:
        output.now = lambda: 100 * time.monotonic_ns()
        for _ in range(100):
            log.error("failed")

        def told() -> int:
            lines = [json.loads(line) for line in output.written.splitlines()]
            return sum(line.get("suppressed", 1) for line in lines)

        eventually(lambda: told() == 100, "all are logged or counted")
        assert "more like this" in output.written


def test_what_was_counted_is_told_at_the_end() -> None:
    with logging_to(repeat_limit=1) as output:
        for _ in range(1235):
            log.error("failed")
    assert output.written.splitlines()[-1].endswith(
        '"message": "... 1,234 more like this: failed", "suppressed": 1234}'
    )


def test_information_is_never_counted_away() -> None:
    with logging_to(repeat_limit=1) as output:
        for number in range(500):
            log.info("successfully loaded '%d'", number)
        assert len(output.lines) == 500


def test_models_log_through_the_server() -> None:
    with logging_to(repeat_limit=2, verbose=1) as output:
        for _ in range(3):
            Logger.log_info("from a model")
        Logger.log_verbose("closely")
        Logger.log_warn("careful")
        Logger.log_error("100 % wrong")
        Logger.log("plain")
        lines = [(line["level"], line["message"]) for line in output.lines]
        assert lines == [
            ("info", "from a model"),
            ("info", "from a model"),
            ("debug", "closely"),
            ("warning", "careful"),
            ("error", "100 % wrong"),
            ("info", "plain"),
        ]
        assert {line["logger"] for line in output.lines} == {"conch.python_model"}


def test_a_message_that_does_not_fit_its_arguments() -> None:
    with logging_to() as output:
        log.info("%d models", "three")
        log.warning("with an extra", extra={"what": Unprintable()})
        log.error(Unprintable())
        messages = output.messages
    assert messages == [
        "a message could not be formatted, TypeError: %d models",
        "a message could not be formatted, ValueError: with an extra",
        "a message could not be formatted, ValueError: Unprintable",
    ]


def test_a_file_gets_text_unless_told_otherwise(tmp_path: Path) -> None:
    for as_json, begin in ((None, "I"), (False, "I"), (True, "{")):
        path = tmp_path / f"log-{as_json}"
        handler = configure(LogOptions(file=path, json=as_json))
        try:
            log.info("hello")
        finally:
            unconfigure(handler)
        assert path.read_text().startswith(begin)
        assert path.read_text().count("\n") == 1


@pytest.mark.parametrize(
    ("options", "access", "text"),
    [
        (lambda path: LogOptions(file=path), None, "--log-file can't be opened: "),
        (lambda path: LogOptions(), AccessLogOptions, "--access-log can't be opened: "),
    ],
)
def test_files_that_can_not_be_opened(
    tmp_path: Path,
    options: Callable[[Path], LogOptions],
    access: Callable[[Path], AccessLogOptions] | None,
    text: str,
) -> None:
    path = tmp_path / "missing" / "log"
    with pytest.raises(LogFileError, match=text):
        open_logs(options(path), access and access(path))


def test_nothing_of_it_is_left_behind(tmp_path: Path) -> None:
    loggers = [logging.getLogger(name) for name in ("conch", "conch_control")]
    before = [(logger.level, logger.propagate, list(logger.handlers)) for logger in loggers]
    unconfigure(configure(LogOptions(file=tmp_path / "log", verbose=1)))
    assert [(logger.level, logger.propagate, list(logger.handlers)) for logger in loggers] == before


FORKING = """
from pathlib import Path
from conch.observability.logging.log_handler import configure, unconfigure
from conch.observability.logging.log_settings import LogOptions
handler = configure(LogOptions(file=Path(sys.argv[1])))
"""


@pytest.mark.process
def test_a_child_logs_although_its_parent_forked_while_another_thread_logged(tmp_path: Path) -> None:
    path = tmp_path / "log"
    assert log_in_a_fork(FORKING, "True", "unconfigure(handler)", str(path)) == 0
    assert path.read_text().count("from the child") == 1
