"""Settings of the HTTP port."""

from __future__ import annotations

import re

from conch.cli.settings.setting import SettingGroup, optional, repeatable, setting
from conch.cli.settings.value_types import (
    ANY_PORT,
    BOOL,
    FILE,
    HTTP_THREADS,
    INPUT_SIZE,
    NATURAL,
    POSITIVE,
    TEXT,
)


class HttpSettings(SettingGroup):
    """The port, its limits and its access rules."""

    title = "HTTP"
    allow_http = setting(BOOL, True, "serve REST")
    http_address = setting(TEXT, "0.0.0.0", "address for REST")
    http_port = setting(ANY_PORT, 8000, "port for REST; 0 for any free one")
    reuse_http_port = setting(BOOL, False, "let other processes listen on the REST port too")
    http_thread_count = setting(
        HTTP_THREADS, 8, "1, or Triton's default 8, which is taken for it: one thread serves all connections"
    )
    http_max_input_size = setting(
        INPUT_SIZE,
        64 << 20,
        "maximum size of a JSON, raw or decompressed body; binary tensors behind JSON do not count",
        unit="bytes",
    )
    http_max_connections = setting(
        NATURAL,
        0,
        "maximum connections to the HTTP port; further ones get 503; 0 for three eighths of the process's "
        "file descriptors (ulimit -n)",
    )
    http_idle_timeout_secs = setting(
        POSITIVE, 300, "time after which an unused REST connection is closed", unit="seconds"
    )
    http_header_forward_pattern = setting(TEXT, "", "request headers forwarded as request parameters")
    http_restricted_api = repeatable(
        TEXT, "<API,…>:<key>=<value>: APIs that need this header", secret=re.compile(r"[^=]*=")
    )
    http_cors_origin = repeatable(
        TEXT,
        "origin whose web pages may run models over REST, such as https://app.example, or * for any; nothing "
        "else is open to them",
    )


class HttpTlsSettings(SettingGroup):
    """TLS of the HTTP port."""

    title = "HTTP TLS"
    http_use_ssl = setting(BOOL, False, "serve REST over TLS")
    http_server_cert = optional(FILE, "PEM file of the REST port's certificate")
    http_server_key = optional(FILE, "PEM file of the REST port's key")
    http_root_cert = optional(FILE, "PEM file of the root certificates that REST clients must have one from")
