"""A server in this process with one model, for a chat on this machine."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from conch.core.errors import ConchError, error_text
from conch.core.temporary_folder import TemporaryFolder
from conch_api.embedded_server import Server
from conch_hub.file_choice import GENAI, LLAMA, Choice, choose_files
from conch_hub.source import PullError
from conch_hub.sources.local_files import LocalSource

_HOST = "127.0.0.1"
_PACKAGES = {LLAMA: ("xllamacpp", "llama"), GENAI: ("openvino_genai", "genai")}


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """Settings of the server.

    Attributes:
        context: Most tokens of a prompt and its answer; 0 for the engine's own default.
        port: The HTTP port; 0 for any free one.
        console: True to open the console, whose chat page may ask the model.
    """

    context: int = 0
    port: int = 0
    console: bool = False


@contextmanager
def serving(path: Path, name: str, settings: ServeSettings, pattern: str = "") -> Iterator[Server]:
    """A running server with the model of a file or a folder, for a block.

    Args:
        path: The file or the folder, which is linked and not changed.
        name: The model's name.
        settings: Settings of the server.
        pattern: Path or pattern of the file in a folder.

    Raises:
        PullError: There is no such model, it has no engine here, or it can't be loaded.
    """
    source = LocalSource(path)
    choice = choose_files(source.listing().files, pattern)
    check_engine(choice)
    with TemporaryFolder("conch-run-") as repository:
        model = repository / name
        (model / "1").mkdir(parents=True)
        for file, remote in choice.files.items():
            source.fetch(remote, model / "1" / file, lambda _: None)
        # One chat at a time: a slot takes the memory of a whole context.
        parameters = {"max_num_seqs": "1"}
        if settings.context:
            parameters["max_model_len"] = str(settings.context)
        (model / "config.pbtxt").write_text(_config(choice.engine, parameters))
        server = Server(
            str(repository),
            allow_grpc=False,
            allow_metrics=False,
            http_address=_HOST,
            http_port=settings.port,
            console_port=_free_port() if settings.console else 0,
            console_allow_infer=settings.console,
        )
        try:
            server.start()
        except ConchError as error:
            notes: Sequence[str] = getattr(error, "__notes__", ())
            raise PullError("; ".join([f"'{path}' can't be served: {error_text(error)}", *notes])) from None
        with server:
            yield server


def check_engine(choice: Choice) -> None:
    """Raises PullError if this process can't serve a model."""
    if choice.engine not in _PACKAGES:
        raise PullError(
            f"the model is for {choice.engine}, which needs an environment of its own: fetch it with conch "
            f"pull, and see docs/backends/{choice.engine}.md"
        )
    package, extra = _PACKAGES[choice.engine]
    if find_spec(package) is None:
        raise PullError(f"the model needs the package {package}: pip install 'conch[{extra}]'")


def _config(engine: str, parameters: dict[str, str]) -> str:
    lines = [f'backend: "{engine}"']
    lines += [
        f'parameters {{ key: "{key}" value {{ string_value: "{text}" }} }}'
        for key, text in parameters.items()
    ]
    return "\n".join(lines)


def _free_port() -> int:
    with socket.create_server((_HOST, 0)) as listener:
        return int(listener.getsockname()[1])
