"""Flag values to the options of the control plane, and of the control port."""

from __future__ import annotations

from pathlib import Path

from conch.core.errors import InvalidArgumentError
from conch.flags import FlagError, FlagValues
from conch.options import backend_options, control_mode, rate_limits, storage_options
from conch_control.options import ControlOptions
from conch_control.remote_api.options import ControlPortOptions, ServerTls, read_token

_ONLY_WITH_TLS = ("control-server-cert", "control-server-key", "control-root-cert")


def control_options(flags: FlagValues) -> ControlOptions:
    """The settings of the control plane.

    Raises:
        FlagError: Flags contradict each other, or one of them is malformed.
    """
    repositories = tuple(flags["model-repository"]) + tuple(flags["model-store"])
    startup = tuple(flags["load-model"])
    mode = control_mode(flags)
    if startup and mode != "explicit":
        raise FlagError("Use of '--load-model' requires setting '--model-control-mode=explicit' as well.")
    if "*" in startup and len(startup) > 1:
        raise FlagError("Wildcard model name '*' must be the ONLY startup model if specified at all.")
    if flags["allow-model-upload"] and not (mode == "explicit" and flags["allow-model-control"]):
        raise FlagError(
            "--allow-model-upload is for clients that load models: it needs --model-control-mode=explicit "
            "and --allow-model-control"
        )
    strict = flags["strict-model-config"]
    return ControlOptions(
        repositories=repositories,
        mode=mode,
        startup_models=startup,
        strict_model_config=flags["disable-auto-complete-config"] if strict is None else strict,
        load_threads=flags["model-load-thread-count"],
        load_retries=flags["model-load-retry-count"],
        model_config_name=flags["model-config-name"],
        backend_options=backend_options(flags["backend-config"]),
        max_queue_size=flags["max-queue-size"],
        rate_limits=rate_limits(flags),
        storage=storage_options(flags),
        namespacing=flags["model-namespacing"],
    )


def control_port_options(flags: FlagValues) -> ControlPortOptions | None:
    """The settings of the control port; None without one.

    Raises:
        FlagError: A file can't be read, flags contradict each other, or everybody would be let in.
    """
    options = ControlPortOptions(flags["control-address"], flags["control-port"])
    if not options.port and not options.is_unix:
        for name in ("control-use-ssl", "control-token-file", *_ONLY_WITH_TLS):
            if flags[name]:
                raise FlagError(f"--{name} needs --control-port, or a Unix socket in --control-address")
        return None
    options = ControlPortOptions(options.address, options.port, _tls(flags), _token(flags))
    try:
        options.check()
    except InvalidArgumentError as error:
        raise FlagError(f"--control-address: {error.message}") from None
    return options


def _tls(flags: FlagValues) -> ServerTls | None:
    if not flags["control-use-ssl"]:
        for name in _ONLY_WITH_TLS:
            if flags[name] is not None:
                raise FlagError(f"--{name} needs --control-use-ssl")
        return None
    for name in ("control-server-cert", "control-server-key"):
        if flags[name] is None:
            raise FlagError(f"--{name} must be specified to serve the control port over TLS")
    root = flags["control-root-cert"]
    return ServerTls(
        private_key=_read(flags["control-server-key"], "control-server-key"),
        certificate=_read(flags["control-server-cert"], "control-server-cert"),
        client_root=None if root is None else _read(root, "control-root-cert"),
    )


def _token(flags: FlagValues) -> str | None:
    path: Path | None = flags["control-token-file"]
    if path is None:
        return None
    try:
        return read_token(_read(path, "control-token-file").decode(errors="replace"))
    except InvalidArgumentError as error:
        raise FlagError(f"--control-token-file: {path}: {error.message}") from None


def _read(path: Path, name: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise FlagError(f"--{name}: {path} can't be read: {error.strerror}") from None
