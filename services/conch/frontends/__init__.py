"""Front ends: protocols over the core; no scheduling in them."""
