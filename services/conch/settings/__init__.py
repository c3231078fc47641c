"""Settings: options of dataclasses, their types of values and checks."""
