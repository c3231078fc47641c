"""What a load request may put in place of what a repository has: a model's config, and its files.

Front ends hand over parameters as they arrived, with the bytes of files decoded; `read_overrides` is the one
place that knows what they may be.
"""

from __future__ import annotations

import posixpath
import stat
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from conch.core.errors import CancelledError, InvalidArgumentError
from conch.core.server_state import LoadParameter
from conch_control.config.json_format import parse_override
from conch_control.lifecycle.uploaded_files import Folder
from conch_control.repository.layout import Fingerprint
from conch_control.repository.source import Progress, Scan

FILE_PREFIX = "file:"
"""What the names of load parameters that are files begin with; the file's path follows."""

_CONFIG = "config"
_ENVIRONMENT = ("EXECUTION_ENV_PATH", "CONCH_ENV_")
"""How parameters of configs begin that choose the interpreter and the variables of a model's workers."""

_TYPES = {bool: "BOOL", int: "INT", str: "STRING", bytes: "BYTES"}
_MOST_NAME_BYTES = 255
# Far below what the system takes: directories as deep as that can be walked and removed by recursion.
_MOST_PATH_BYTES = 1024


@dataclass(frozen=True, slots=True)
class Overrides:
    """What is in a load request besides the name.

    Attributes:
        config: A config in JSON to use in place of the model's file, if any.
        files: Contents of files by their paths as the client wrote them: all there is of the model. Nothing
            for what the repository has.
    """

    config: str | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)


def read_overrides(parameters: Mapping[str, LoadParameter]) -> Overrides:
    """Reads the parameters of a load request.

    Args:
        parameters: ``config`` and ``file:<path>``, the latter as bytes.

    Raises:
        InvalidArgumentError: A parameter is unknown, or has a value of the wrong type.
    """
    config: str | None = None
    files: dict[str, bytes] = {}
    for key, value in parameters.items():
        if key == _CONFIG:
            if not isinstance(value, str):
                raise InvalidArgumentError("Config parameter 'config' must have string type for its value")
            config = value
        elif key.startswith(FILE_PREFIX):
            if not isinstance(value, bytes):
                raise InvalidArgumentError(f"File parameter '{key}' must have bytes type for its value")
            files[key.removeprefix(FILE_PREFIX)] = value
        else:
            kind = _TYPES[type(value)]
            raise InvalidArgumentError(f"Unrecognized load parameter '{key}' with type '{kind}'")
    return Overrides(config, files)


def brought_code(parameters: Mapping[str, LoadParameter]) -> str:
    """Names what in a load request decides which code runs, beyond the repository; empty for nothing.

    A config that is malformed brings none, as no model is loaded with it.
    """
    file = next((key for key in parameters if key.startswith(FILE_PREFIX)), None)
    if file is not None:
        return f"a file ('{file}')"
    config = parameters.get(_CONFIG)
    try:
        named = parse_override(config).parameters if isinstance(config, str) else ()
    except InvalidArgumentError:
        return ""
    chosen = next((key for key in sorted(named) if key.startswith(_ENVIRONMENT)), None)
    return "" if chosen is None else f"an environment (parameter '{chosen}' of its config)"


def overridden(name: str, overrides: Overrides, scan: Scan) -> Scan:
    """What the repositories would hold if the files of a load request were the model.

    Args:
        name: Model name.
        overrides: What was in the request.
        scan: What they do hold.

    Raises:
        InvalidArgumentError: The files do not make a model.
    """
    if not overrides.files:
        return scan
    if overrides.config is None:
        raise InvalidArgumentError("Load parameter 'config' must be specified for model file override")
    if not name.isprintable():
        raise InvalidArgumentError(f"model name {name!r} is not text")
    models = {**scan.models, name: Given(name, arranged(overrides.files))}
    remembered = {other: source for other, source in scan.remembered.items() if other != name}
    return replace(scan, models=models, duplicates=scan.duplicates - {name}, remembered=remembered)


def placed(path: str) -> str:
    """Where a file of a load request goes: its path inside the model's directory, normalised.

    A path that begins with a slash begins at the model's directory, as in Triton.

    Raises:
        InvalidArgumentError: It would be outside, names a directory, or can't be the name of a file.
    """
    parameter = f"Invalid file parameter '{FILE_PREFIX}{path}'"
    try:
        encoded = path.encode()
    except UnicodeEncodeError:
        raise InvalidArgumentError(f"{parameter}, path must be text") from None
    normal = posixpath.normpath(path.lstrip("/"))
    first = normal.partition("/")[0]
    if first == "..":
        raise InvalidArgumentError(
            f"{parameter} with normalized path '{normal}' must stay within model directory."
        )
    if posixpath.basename(path) in ("", ".", ".."):
        raise InvalidArgumentError(f"{parameter}, path must name a file, not a directory")
    if b"\0" in encoded:
        raise InvalidArgumentError(f"{parameter}, path must not contain a null character")
    if len(normal.encode()) > _MOST_PATH_BYTES:
        raise InvalidArgumentError(f"{parameter}, path must have at most {_MOST_PATH_BYTES} bytes")
    for part in normal.split("/"):
        if len(part.encode()) > _MOST_NAME_BYTES:
            raise InvalidArgumentError(
                f"{parameter}, names in it must have at most {_MOST_NAME_BYTES} bytes each"
            )
    return normal


def arranged(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """The contents of a model's directory: by normalised path.

    Raises:
        InvalidArgumentError: A path can't be used, two of them are the same, or one is in another one.
    """
    arrangement: dict[str, bytes] = {}
    origins: dict[str, str] = {}
    for path, content in files.items():
        place = placed(path)
        if place in arrangement:
            raise InvalidArgumentError(
                f"Invalid file parameter '{FILE_PREFIX}{path}', it is the same file as "
                f"'{FILE_PREFIX}{origins[place]}'"
            )
        arrangement[place] = content
        origins[place] = path
    for place, path in origins.items():
        if any(directory in arrangement for directory in _directories(place)):
            raise InvalidArgumentError(
                f"Invalid file parameter '{FILE_PREFIX}{path}', directory has been created as a file"
            )
    return arrangement


class Given:
    """A model whose files came with a load request; a `ModelSource`.

    Each one has a fingerprint of its own, so that the model is loaded anew whatever comes next.

    Args:
        name: Model name.
        files: The contents of its directory; see `arranged`.
    """

    def __init__(self, name: str, files: Mapping[str, bytes]) -> None:
        self._name = name
        self._files = files
        identity = uuid.uuid4().hex
        self._fingerprint = tuple(sorted((path, len(data), 0, identity) for path, data in files.items()))

    @property
    def name(self) -> str:
        """Model name."""
        return self._name

    @property
    def location(self) -> str:
        """Words that say where the files come from."""
        return "load request"

    def fingerprint(self) -> Fingerprint:
        """What was given; never what anything else is."""
        return self._fingerprint

    def read(self, path: str) -> bytes:
        """The contents of a file.

        Raises:
            FileNotFoundError: There is none.
        """
        try:
            return self._files[path]
        except KeyError:
            raise FileNotFoundError(f"no file '{path}' came with the load request") from None

    def stage(self, progress: Progress, cancelled: Callable[[], bool]) -> Folder:
        """Writes the files into a directory of their own.

        Raises:
            OSError: They can't be written; nothing is left behind.
            CancelledError: It was told to give up; nothing is left behind.
        """
        folder = Folder(self._fingerprint)
        try:
            total, done = sum(map(len, self._files.values())), 0
            for directory in sorted({part for path in self._files for part in _directories(path)}):
                (folder.directory / directory).mkdir(stat.S_IRWXU)
            for path, content in self._files.items():
                if cancelled():
                    raise CancelledError(f"the load of model '{self._name}' was given up")
                with (folder.directory / path).open("xb") as file:
                    file.write(content)
                done += len(content)
                progress(done, total)
        except BaseException:
            folder.release()
            raise
        return folder


def _directories(path: str) -> Iterator[str]:
    """The directories that a normalised path goes through, outermost first."""
    position = path.find("/")
    while position >= 0:
        yield path[:position]
        position = path.find("/", position + 1)
