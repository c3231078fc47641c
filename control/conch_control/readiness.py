"""Which states of a model keep a server from being ready, where readiness is strict."""

from __future__ import annotations

from conch.core.registry import Entry


def as_wanted(entry: Entry) -> bool:
    """Whether a model is as its operator wants it: it serves, or has been taken out of service.

    Triton looks at each version: one that is being loaded, that has failed or that finishes its last requests
    makes a server not ready, though another version of the model serves. Replicas that follow one storage
    would all stop getting requests at once for a broken update that no client ever sees, so here a model
    with a version that serves counts as ready whatever becomes of its others, and so does a model that is
    being unloaded.
    """
    return bool(entry.ready) or all(_gone(state.state, state.reason) for state in entry.states.values())


def _gone(state: str, reason: str) -> bool:
    return state == "UNLOADING" or (state == "UNAVAILABLE" and reason == "unloaded")
