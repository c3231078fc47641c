"""The door: the one interface by which front ends reach the core, and the operations that pass it."""
