"""The planner: follows model repositories and tells the agent what to load and unload."""
