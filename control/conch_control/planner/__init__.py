"""The planner: watches repositories and has an agent run what is in them."""
