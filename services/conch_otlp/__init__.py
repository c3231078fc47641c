"""Export by OpenTelemetry's protocol (OTLP): an add-on, found by the entry point ``conch.exporters``."""
