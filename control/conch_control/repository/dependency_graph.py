"""Which models ensembles are made of, and the order in which they are loaded: parts first, side by side."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from graphlib import TopologicalSorter

from conch.core.errors import ConchError
from conch_control.config.json_format import parse_override
from conch_control.config.parse import decode_config
from conch_control.options import ControlOptions
from conch_control.repository.layout import CONFIG_FILE, variant_path
from conch_control.repository.namespaces import Namespaced
from conch_control.repository.source import ModelSource

Graph = dict[str, tuple[str, ...]]
"""Names of the models that each model is made of; none for all but ensembles."""


def read_composing_models(
    source: ModelSource, options: ControlOptions, override: str | None = None
) -> tuple[str, ...]:
    """Models that an ensemble's config names, by identifier; none for one that can't be read.

    Whoever loads it finds out again why it can't.
    """
    try:
        if override is not None:
            config = parse_override(override)
        else:
            content = config_content(source, options.model_config_name)
            if b"ensemble_scheduling" not in content:
                return ()  # sooner said than by parsing all configs twice
            config = decode_config(content, source.location)
    except (ConchError, OSError):
        return ()
    if isinstance(source, Namespaced):
        names: Iterable[str] = source.identify(config)
    else:
        names = (step.model_name for step in config.ensemble_scheduling.step)
    return tuple(dict.fromkeys(name for name in names if name))


def config_content(source: ModelSource, config_name: str) -> bytes:
    """The contents of a model's config file: the named variant where there is one, else the usual one.

    Raises:
        OSError: There is none, or it can't be read.
    """
    if config_name:
        with suppress(FileNotFoundError):
            return source.read(variant_path(config_name))
    return source.read(CONFIG_FILE)


def build_graph(names: Iterable[str], parts: Callable[[str], tuple[str, ...]]) -> Graph:
    """Models with all that they are made of, and what that is made of."""
    graph: Graph = {}
    unseen = list(names)
    while unseen:
        name = unseen.pop()
        if name not in graph:
            graph[name] = parts(name)
            unseen += graph[name]
    return graph


def find_cycles(graph: Graph) -> dict[str, str]:
    """Models that are, in the end, made of themselves; each with the last on the way back to it."""
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
    """Does something with each model after it has been done with what the model is made of.

    Args:
        graph: The models, without circles.
        run: What to do; is told what has failed so far.
        threads: Most models at the same time.

    Returns:
        What was raised, by model.
    """
    failures: dict[str, Exception] = {}
    if len(graph) == 1:  # most loads that clients ask for need no thread
        (name,) = graph
        try:
            run(name, failures)
        except Exception as error:
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
            while ready and len(running) < threads:  # waiting for thousands at a time would take long
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
