"""The commands, for the entry-point group ``conch.commands``."""

from __future__ import annotations

from conch.cli.command import Command

TRACE = Command(
    "conch_tools.trace_command", "COMMAND", "show where time goes, from trace files", True, after="access"
)
NEW = Command(
    "conch_tools.new_command", "model NAME", "write a first Python model and its test", after="completion"
)
PERF = Command("conch_tools.perf_command", "MODEL", "measure a model of a running server", True, after="top")
INFER = Command(
    "conch_tools.infer_command", "MODEL", "send requests to a model of a running server", True, after="health"
)
TOP = Command(
    "conch_tools.top_command", "[flags]", "watch the models of a running server", True, after="infer"
)
DUMP = Command(
    "conch_tools.dump_command",
    "[PID]",
    "write the stacks of all threads of a running server",
    after="health",
)
CONVERT = Command(
    "conch_tools.convert.convert_command",
    "PICKLE",
    "convert a pickle, read without rights, and compare what is served with it",
    True,
    after="new",
)
OPTIMIZE = Command(
    "conch_tools.optimize.optimize_command",
    "SOURCE -o DIR",
    "convert a model, check and measure the results, and make a repository of the best",
    True,
    after="convert",
)
TUNE = Command(
    "conch_tools.tune_command",
    "MODEL",
    "search the settings that serve a model best, on a server of its own",
    True,
    after="perf",
)
PROFILE = Command(
    "conch_tools.profile_command",
    "FILE",
    "write the profile of a training set, which requests are compared with",
    True,
    after="convert",
)
