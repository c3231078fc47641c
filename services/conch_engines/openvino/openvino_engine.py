"""The `openvino` package: its import, its error texts, and `Engine`, which compiles one model.

Owns: per model version, an OpenVINO core, so that extensions and threads go with the version.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from conch.core.engine_text import engine_text
from conch.core.errors import ConchError, InternalError, InvalidArgumentError
from conch.core.file_formats import ONNX, OPENVINO_IR, SAVED_MODEL, TFLITE, describe, identify
from conch_engines.model_paths import resolves
from conch_engines.openvino.openvino_settings import OpenVinoSettings

log = logging.getLogger(__name__)

_TELEMETRY = "openvino_telemetry"
_READABLE = (ONNX, OPENVINO_IR, SAVED_MODEL, TFLITE)
_CHECK = re.compile(r"Check '(.*)' failed:")


def import_openvino() -> Any:
    """Imports the package without its telemetry.

    Importing it would otherwise write to the user's home, start a thread and send usage data; OpenVINO
    does without where the package for that is missing.
    """
    absent = object()
    telemetry: Any = sys.modules.get(_TELEMETRY, absent)
    if telemetry is absent:
        sys.modules[_TELEMETRY] = None  # type: ignore[assignment]
    try:
        import openvino
    finally:
        if telemetry is absent:
            del sys.modules[_TELEMETRY]
    return openvino


def openvino_text(error: BaseException) -> str:
    """The text of an OpenVINO exception without places in its sources and without conditions."""
    text = engine_text(error).replace("Caught exception:", " ")
    for checks in ("", r"\1"):  # the conditions, if nothing else tells the cause
        shown = " ".join(_CHECK.sub(checks, text).split())
        if shown:
            return shown
    return type(error).__name__


def engine_error(what: str, error: BaseException) -> BaseException:
    """An OpenVINO exception as `InternalError` in Triton's words; other errors stay what they are."""
    if isinstance(error, (ConchError, MemoryError)):
        return error
    return InternalError(f"openvino error in {what} : {openvino_text(error)}")


def raise_engine_error(what: str, error: Exception) -> NoReturn:
    """Raises what `engine_error` makes of an exception."""
    made = engine_error(what, error)
    if made is error:
        raise error
    raise made from error


@contextmanager
def engine_errors(what: str) -> Iterator[None]:
    """Raises OpenVINO's exceptions as `engine_error`."""
    try:
        yield
    except Exception as error:  # of the engine
        raise_engine_error(what, error)


class Engine:
    """An OpenVINO core for one model version.

    Args:
        ov: The `openvino` package.
        settings: The version's settings.
    """

    def __init__(self, ov: Any, settings: OpenVinoSettings) -> None:
        self._settings = settings
        self._core = ov.Core()
        if settings.extension:
            try:
                self._core.add_extension(settings.extension)
            except Exception as error:  # of the engine, or of the library that it runs
                raise InvalidArgumentError(
                    f"openvino error in  loading custom CPU extensions : {openvino_text(error)}"
                ) from error

    def read(self, path: Path) -> Any:
        """Reads a model file or folder; the format is recognised by OpenVINO."""
        what = f"reading model '{path}'"
        if identify(path) not in (None, *_READABLE):  # OpenVINO would try all its formats in turn
            raise InternalError(f"openvino error in {what} : the file {describe(path)}")
        try:
            with engine_errors(what):
                return self._core.read_model(str(path))
        except InternalError as error:
            if resolves(path):
                raise
            raise InternalError(
                f"{error.message}; OpenVINO reads external weights of ONNX models only from paths that "
                f"resolve, not through a link into another container's root: save the model in OpenVINO's "
                f"own format, model.xml, or with the weights inside"
            ) from error

    def compile(self, model: Any, name: str) -> Any:
        """Compiles a model for the device."""
        settings = self._settings
        with engine_errors("loading network"):
            compiled = self._core.compile_model(model, settings.device, dict(settings.properties))
        if settings.on_cpu:
            log.info(
                "model '%s' runs with %s streams on %s threads in all, in %s",
                name,
                compiled.get_property("NUM_STREAMS"),
                compiled.get_property("INFERENCE_NUM_THREADS"),
                compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name(),
            )
        return compiled
