"""Settings of the control port."""

from __future__ import annotations

from conch.cli.settings.setting import SettingGroup, optional, setting
from conch.cli.settings.value_types import BOOL, FILE, PORT, TEXT


class ControlPortSettings(SettingGroup):
    """The port for conch models and conch control."""

    title = "control port"
    control_port = setting(PORT, 0, "port for conch models and conch control; 0 for none")
    control_address = setting(
        TEXT,
        "127.0.0.1",
        "address for the control port, or unix:PATH; its clients decide what code the server runs, so an "
        "address that other machines reach needs --control-token-file or --control-root-cert",
    )
    control_token_file = optional(FILE, "file with the token that clients of the control port must send")
    control_use_ssl = setting(BOOL, False, "serve the control port over TLS")
    control_server_cert = optional(FILE, "PEM file of the control port's certificate")
    control_server_key = optional(FILE, "PEM file of the control port's key")
    control_root_cert = optional(FILE, "PEM file of the root certificates that clients must have one from")
