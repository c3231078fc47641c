"""Access policies: principals, their credentials, roles and limits, and the audit of their calls."""
