"""TLS of all ports by one certificate; the settings of a port stand above it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from conch.settings.option import FlagError

_PAIR = "--tls-cert and --tls-key"


def port_settings(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> Mapping[str, tuple[Any, str]]:
    """Values of ports' own TLS settings that follow from the shared files, with the flags they follow from.

    A port is one that has a setting such as ``http_use_ssl``. What is given for a port wins.

    Args:
        defaults: Defaults of all settings, by key.
        given: Values that are given, by key.

    Raises:
        FlagError: The certificate or its key is missing.
    """
    certificate, private_key, root = map(given.get, ("tls_cert", "tls_key", "tls_client_ca"))
    if certificate is None and private_key is None:
        if root is not None:
            raise FlagError(f"--tls-client-ca needs {_PAIR}")
        return {}
    if certificate is None or private_key is None:
        missing = "--tls-cert" if certificate is None else "--tls-key"
        raise FlagError(f"{_PAIR} belong together: {missing} is missing")
    values, found = {**defaults, **given}, {}
    for port in (key.removesuffix("_use_ssl") for key in defaults if key.endswith("_use_ssl")):
        number, address = f"{port}_port", str(values[f"{port}_address"])
        is_on = values[number] or defaults[number] or address.startswith("unix:")  # 0 is any port, or none
        if not is_on or given.get(f"{port}_use_ssl") is False:
            continue
        found[f"{port}_use_ssl"] = True, "--tls-cert"
        if not {f"{port}_server_cert", f"{port}_server_key"} & given.keys():
            found[f"{port}_server_cert"] = certificate, "--tls-cert"
            found[f"{port}_server_key"] = private_key, "--tls-key"
        if root is not None:
            found[f"{port}_use_ssl_mutual"] = True, "--tls-client-ca"
            found[f"{port}_root_cert"] = root, "--tls-client-ca"
    return {key: each for key, each in found.items() if key in defaults}
