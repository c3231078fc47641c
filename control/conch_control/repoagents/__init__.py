"""Repository agents: hooks that the config of a model names, run when the model is loaded and unloaded."""

from __future__ import annotations

from conch_control.repoagents.base import ModelContext, RepositoryHook
from conch_control.repoagents.chain import AgentChain, make_chain

__all__ = ["AgentChain", "ModelContext", "RepositoryHook", "make_chain"]
