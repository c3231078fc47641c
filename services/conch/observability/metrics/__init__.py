"""Metrics: what the server counts, in Prometheus' text format and in OpenMetrics."""
