"""Checks repositories without serving them: every problem at once, and where it is."""
