"""Sensor that waits for a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from airflow.sdk import BaseSensorOperator

from airflow_provider_conch.hook import ConchHook, ConchUnreachableError


class ConchModelReadySensor(BaseSensorOperator):
    """Waits until a model is ready, also while the server can't be reached.

    Args:
        model: The model.
        version: Its version or label; None for the one that requests without a version get.
        conch_conn_id: The Airflow connection.
        arguments: Arguments of every sensor, such as ``mode``, ``poke_interval`` and ``timeout``.
    """

    template_fields: Sequence[str] = ("model", "version")

    def __init__(
        self,
        *,
        model: str,
        version: int | str | None = None,
        conch_conn_id: str = ConchHook.default_conn_name,
        **arguments: Any,
    ) -> None:
        super().__init__(**arguments)
        self.model = model
        self.version = version
        self.conch_conn_id = conch_conn_id

    def poke(self, context: Any) -> bool:
        """Asks once."""
        try:
            return ConchHook(self.conch_conn_id).ready(self.model, self.version or None)
        except ConchUnreachableError as error:
            self.log.info("%s", error)
            return False
