"""Files that conch writes beside the artifact in a version's directory, for scoring and warm-up."""

from __future__ import annotations

SIGNATURE_FILE = "mlflow/signature.json"
"""The model's signature, as in its MLmodel."""
EXAMPLE_FILE = "mlflow/serving_input_example.json"
"""A request of MLflow's scoring protocol."""
