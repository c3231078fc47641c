"""Model configs: parsed, completed, normalised, validated, and turned into what the core reads."""
