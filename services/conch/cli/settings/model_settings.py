"""Settings of model repositories, of model control and of loads."""

from __future__ import annotations

import re

from conch.cli.settings.server_settings import SECRET_OPTION
from conch.cli.settings.setting import SettingGroup, optional, repeatable, setting
from conch.cli.settings.value_types import (
    BOOL,
    CONFIG_NAME,
    DIRECTORY,
    DURATION,
    INTERVAL,
    NATURAL,
    POSITIVE,
    REPOSITORY,
    TEXT,
)

_SECRET_URL = re.compile(r".*?://[^/@:]*:(?=[^/@]+@)")
"""Scheme and user of a URL with a password; the rest is hidden."""


class RepositorySettings(SettingGroup):
    """Where models come from."""

    title = "model repositories"
    model_repository = repeatable(
        REPOSITORY, "directory of models, or s3://, gs:// or as:// URL of one", secret=_SECRET_URL
    )
    model_store = repeatable(REPOSITORY, replaced_by="model-repository", secret=_SECRET_URL)
    model_name = optional(
        TEXT,
        "name of the model, if a local --model-repository is the directory of one model or a model's file; a "
        "repository of models may be there as well, and is served as it is",
    )
    repository_wait_secs = setting(
        DURATION,
        0.0,
        "time to wait at the start for a local --model-repository that is not there yet",
        unit="seconds",
    )
    model_namespacing = setting(
        BOOL, False, "let several repositories have models of one name, for ensembles of the same repository"
    )
    model_cache_directory = optional(
        DIRECTORY, "directory for models fetched from object stores; without it ~/.cache/conch/models"
    )
    model_cache_byte_size = setting(
        NATURAL, 0, "maximum size of that directory; 0 for no limit", unit="bytes"
    )
    storage_timeout_secs = setting(
        POSITIVE, 30, "time after which an object store that does not answer has failed", unit="seconds"
    )


class ModelControlSettings(SettingGroup):
    """Which models are loaded, and when."""

    title = "model control"
    model_control_mode = setting(
        TEXT,
        "none",
        "none: load all models at the start; explicit: load the models that clients name; poll: load all "
        "models and look for changes at intervals; watch: load all models and follow file-system events",
        choices=("none", "explicit", "poll", "watch"),
    )
    load_model = repeatable(TEXT, "model to load at the start in explicit mode, or '*' for all")
    reload = setting(
        BOOL,
        False,
        "for development: reload a model soon after one of its files is saved; the version that serves goes "
        "on if the reload fails",
    )
    repository_poll_secs = setting(INTERVAL, 15.0, "time between looks at model repositories", unit="seconds")
    repository_settle_secs = setting(
        INTERVAL, 1.0, "time without a change to a model's files before it is loaded", unit="seconds"
    )
    allow_model_control = setting(
        BOOL, True, "let clients of the inference ports load and unload models in explicit mode"
    )
    allow_model_upload = setting(
        BOOL,
        False,
        "accept loads that bring a model's files, and so code, from all clients; else only from clients on "
        "this machine, with a client certificate or with the key of a restricted API",
    )


class ModelLoadSettings(SettingGroup):
    """How models are loaded."""

    title = "model loading"
    model_load_thread_count = setting(POSITIVE, 4, "models loaded at the same time")
    model_load_retry_count = setting(NATURAL, 0, "retries of a version that failed to load")
    max_queue_size = setting(
        NATURAL,
        16384,
        "requests that may wait for a model version, 0 for no limit; a model's parameter "
        "CONCH_MAX_QUEUE_SIZE wins",
    )
    max_model_config_size = setting(
        POSITIVE,
        1 << 20,
        "maximum size of a model's config, in a file or a load request; larger ones fail the load",
        unit="bytes",
    )
    model_config_name = setting(CONFIG_NAME, "", "use configs/<name>.pbtxt of a model where it exists")
    disable_auto_complete_config = setting(BOOL, False, "do not complete model configs")
    strict_model_config = optional(BOOL, replaced_by="disable-auto-complete-config")
    backend_directory = optional(
        DIRECTORY,
        "directory of Python-based backends: <name>/model.py runs all models whose backend is <name>",
    )
    backend_config = repeatable(TEXT, "<backend>,<setting>=<value>", secret=SECRET_OPTION)
