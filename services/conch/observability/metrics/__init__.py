"""Metrics in Prometheus' text format and in OpenMetrics."""
