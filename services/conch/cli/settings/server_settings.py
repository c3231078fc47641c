"""Settings of the server as a whole: start and stop, response cache, rate limiter."""

from __future__ import annotations

import re

from conch.cli.settings.setting import SettingGroup, optional, repeatable, setting
from conch.cli.settings.value_types import BOOL, CAPABILITY, DURATION, FILE, NATURAL, TEXT

SECRET_OPTION = re.compile(r"(?i).*?(password|secret|token|credential|key)[^=]*=")
"""An option such as ``redis,password=``; the rest is hidden."""


class ServerSettings(SettingGroup):
    """Identity, readiness and stop."""

    title = "server"
    id = setting(TEXT, "triton", "name of this server in its metadata")
    exit_on_error = setting(BOOL, True, "exit if a model fails to load at the start")
    strict_readiness = setting(BOOL, True, "ready only if all models are")
    drain_delay = setting(
        DURATION, 0.0, "time to go on serving, not ready, after a stop was requested", unit="seconds"
    )
    exit_timeout_secs = setting(NATURAL, 30, "time that open requests may take after that", unit="seconds")
    listen_while_loading = setting(
        BOOL,
        False,
        "answer probes (live, not ready) and requests for loaded models before all startup models are loaded",
    )
    allow_client_shm = setting(
        BOOL, True, "let clients register system and CUDA shared memory; see docs/shared-memory.md"
    )
    min_supported_compute_capability = setting(
        CAPABILITY, 6.0, "minimum CUDA compute capability of the GPUs used"
    )
    config_file = optional(FILE, "TOML file with values of these settings")


class CacheSettings(SettingGroup):
    """The response cache."""

    title = "response cache"
    cache_config = repeatable(
        TEXT,
        "<cache>,<setting>=<value>, such as local,size=1048576; see docs/cache.md",
        secret=SECRET_OPTION,
    )
    response_cache_byte_size = optional(NATURAL, unit="bytes", replaced_by="cache-config=local,size=BYTES")


class RateLimitSettings(SettingGroup):
    """The rate limiter."""

    title = "rate limiter"
    rate_limit = setting(
        TEXT,
        "off",
        "execution_count: instances run while the resources of their config are free, those first that have "
        "run least by their priority; off: resources are ignored",
        choices=("off", "execution_count"),
    )
    rate_limit_resource = repeatable(
        TEXT,
        "<name>:<count>[:<device>], how much of a resource exists; without any, as much as the largest "
        "instance needs",
    )
