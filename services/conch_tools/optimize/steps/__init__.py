"""The steps' functions, and the script that runs one; each runs in whatever environment has its framework."""
