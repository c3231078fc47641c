"""The commands, for the entry-point group ``conch.commands``."""

from __future__ import annotations

from conch.cli.command import Command

PULL = Command(
    "conch_hub.pull_command",
    "SOURCE",
    "fetch a language model into a model repository: from a hub, a URL, an object store or a registry",
    True,
    after="demo",
)
RUN = Command(
    "conch_hub.run_command",
    "MODEL [PROMPT]",
    "serve a GGUF file, a folder or a source of conch pull, and open a chat",
    True,
    after="pull",
)
