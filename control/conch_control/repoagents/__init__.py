"""Repository agents: hooks that the config of a model names, run when the model is loaded and unloaded."""

from __future__ import annotations

from conch_control.repoagents.chain import AgentChain, make_chain
from conch_control.repoagents.hooks import ModelContext, RepositoryHook

__all__ = ["AgentChain", "ModelContext", "RepositoryHook", "make_chain"]
