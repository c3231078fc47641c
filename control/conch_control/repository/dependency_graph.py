"""The graph of ensembles and their composing models, and parallel work in its order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from graphlib import TopologicalSorter

from conch.core.errors import ConchError
from conch.protocol.model_config_pb2 import ModelConfig
from conch_control.config.json_format import parse_override
from conch_control.config.parse import decode_config, normalize
from conch_control.config.validate import config_problems
from conch_control.control_options import ControlOptions
from conch_control.repository.layout import CONFIG_FILE, variant_path
from conch_control.repository.namespaces import Namespaced
from conch_control.repository.source import ModelSource

Graph = dict[str, tuple[str, ...]]
"""Composing models of each model; empty for all but ensembles."""


def read_composing_models(
    source: ModelSource, options: ControlOptions, override: str | None = None
) -> tuple[str, ...]:
    """Identifiers of an ensemble's composing models.

    Empty if its config is unreadable or has problems of its own, which its load reports.
    """
    try:
        if override is not None:
            config = parse_override(override)
        else:
            content = config_content(source, options.model_config_name)
            if b"ensemble_scheduling" not in content:
                return ()  # cheaper than parsing
            config = decode_config(content, source.location, options.max_config_bytes)
    except (ConchError, OSError):
        return ()
    if not config.model_repository_agents.agents and _is_wrong(config):  # agents may replace the config
        return ()
    if isinstance(source, Namespaced):
        names: Iterable[str] = source.identify(config)
    else:
        names = (step.model_name for step in config.ensemble_scheduling.step)
    return tuple(dict.fromkeys(name for name in names if name))


def _is_wrong(config: ModelConfig) -> bool:
    normalized = ModelConfig.FromString(config.SerializeToString())
    normalize(normalized)
    return any(True for _ in config_problems(normalized))


def config_content(source: ModelSource, config_name: str) -> bytes:
    """Content of a model's config file: the named variant if it exists, else ``config.pbtxt``.

    Raises:
        OSError: There is none, or it can't be read.
    """
    if config_name:
        with suppress(FileNotFoundError):
            return source.read(variant_path(config_name))
    return source.read(CONFIG_FILE)


def build_graph(names: Iterable[str], parts: Callable[[str], tuple[str, ...]]) -> Graph:
    """The graph of some models and everything they are composed of."""
    graph: Graph = {}
    unseen = list(names)
    while unseen:
        name = unseen.pop()
        if name not in graph:
            graph[name] = parts(name)
            unseen += graph[name]
    return graph


def find_cycles(graph: Graph) -> dict[str, str]:
    """Models that contain themselves, each with the last model on the way back."""
    found: dict[str, str] = {}
    for name in graph:
        seen: set[str] = set()
        unseen = [name]
        while unseen and name not in found:
            current = unseen.pop()
            if name in graph[current]:
                found[name] = current
            seen.add(current)
            unseen += [part for part in graph[current] if part not in seen]
    return found


def run_in_order(
    graph: Graph, run: Callable[[str, Mapping[str, Exception]], None], threads: int
) -> dict[str, Exception]:
    """Runs a function for each model after its composing models, in parallel; returns the errors by model.

    The graph must have no cycles. `run` gets the errors so far.
    """
    failures: dict[str, Exception] = {}
    if len(graph) == 1:  # the common case needs no thread
        (name,) = graph
        try:
            run(name, failures)
        except Exception as error:  # as the pool below keeps errors: `run` is the caller's
            failures[name] = error
        return failures
    threads = max(threads, 1)
    sorter = TopologicalSorter(graph)
    sorter.prepare()
    ready: deque[str] = deque()
    running: dict[Future[None], str] = {}
    with ThreadPoolExecutor(threads, "conch-load") as pool:
        while sorter.is_active():
            ready.extend(sorted(sorter.get_ready()))
            while ready and len(running) < threads:  # bounded: waiting for thousands of futures is slow
                name = ready.popleft()
                running[pool.submit(run, name, failures)] = name
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                name = running.pop(future)
                raised = future.exception()
                if isinstance(raised, Exception):
                    failures[name] = raised
                elif raised is not None:
                    raise raised
                sorter.done(name)
    return failures
