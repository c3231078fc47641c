"""The ModelControl service: the agent's API on a port of its own, and its client."""
