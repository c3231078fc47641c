"""The route ``/v2/models/M/invocations``: rows in many formats in, predictions out."""
