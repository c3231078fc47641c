"""Export by OpenTelemetry's protocol: endpoints, transports, queues; what is exported is elsewhere."""
