"""OpenAI's routes: requests, checks, errors, answers, event streams."""
