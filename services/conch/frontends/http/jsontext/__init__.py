"""JSON as Triton reads it: its leniencies, its rules for numbers, its error texts."""
