"""Airflow provider of conch: hook, operators, sensor and trigger for a server's REST API."""

from typing import Any


def get_provider_info() -> dict[str, Any]:
    """Tells Airflow what this distribution has; its schema is Airflow's ``provider_info.schema.json``."""
    name, package = "conch", "airflow_provider_conch"
    return {
        "package-name": "airflow-provider-conch",
        "name": name,
        "description": "Swaps and rolls out models of a conch server.",
        "integrations": [{"integration-name": name, "tags": ["software"]}],
        "hooks": [{"integration-name": name, "python-modules": [f"{package}.hook"]}],
        "operators": [
            {"integration-name": name, "python-modules": [f"{package}.swap", f"{package}.rollout"]},
        ],
        "sensors": [{"integration-name": name, "python-modules": [f"{package}.sensor"]}],
        "triggers": [{"integration-name": name, "python-modules": [f"{package}.trigger"]}],
        "connection-types": [
            {
                "connection-type": "conch",
                "hook-name": "conch",
                "hook-class-name": f"{package}.hook.ConchHook",
                "ui-field-behaviour": {
                    "hidden-fields": ["login", "extra"],
                    "relabeling": {"schema": "Scheme", "password": "Token"},
                    "placeholders": {"host": "localhost", "port": "8000", "schema": "http or https"},
                },
            }
        ],
    }
