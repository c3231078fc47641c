"""Repository agents: hooks named in a model's config that run when the model is loaded and unloaded."""

from __future__ import annotations

from conch_control.repoagents.chain import AgentChain, make_chain
from conch_control.repoagents.hooks import ModelContext, RepositoryHook

__all__ = ["AgentChain", "ModelContext", "RepositoryHook", "make_chain"]
