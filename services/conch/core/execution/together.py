"""Runs what makes the instances of a model, several at the same time."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import copy_context

from conch.core.stopping import check_wanted, load_stopped, stopping_with


def run_together(tasks: Sequence[Callable[[], None]], most: int) -> None:
    """Runs tasks on this thread and others, and returns when all that were begun have ended.

    When one fails, or the load is stopped, no other is begun, and `load_stopped` is true in those that run.

    Args:
        tasks: What to run; begun in this order.
        most: How many threads take part.

    Raises:
        BaseException: What the first one that failed has raised.
    """
    todo = deque(tasks)
    failures: list[BaseException] = []
    stopped = load_stopped()

    def work() -> None:
        with stopping_with(lambda: bool(failures) or stopped()):
            while not failures:
                try:
                    task = todo.popleft()
                except IndexError:
                    return
                try:
                    check_wanted()
                    task()
                except BaseException as error:
                    failures.append(error)

    threads: list[threading.Thread] = []
    for number in range(1, min(most, len(tasks))):
        # What is known of the load where it was begun is known to all of it.
        context = copy_context()
        thread = threading.Thread(
            target=context.run, args=(work,), name=f"conch-instances-{number}", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:
            break  # there is room for no more: those that there are do it all
        threads.append(thread)
    work()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
