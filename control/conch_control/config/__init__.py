"""Model configs: parsing, completion, defaults, validation, and conversion to the core's spec."""
