"""Charts, tables and pages of reports, without dependencies."""
