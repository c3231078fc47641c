"""Settings of the metrics."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

_BOOLEANS = {"true": True, "on": True, "1": True, "false": False, "off": False, "0": False}
_COUNTERS = "counter_latencies"
_FIRST_RESPONSES = "histogram_latencies"
_OFF_ONLY = "summary_latencies"
_SUMMARY = "summary_quantiles"


@dataclass(frozen=True, slots=True)
class MetricsOptions:
    """Settings of the metrics.

    Attributes:
        address: Host to listen on.
        port: Port to listen on; 0 for any free one.
        cpu: Whether those of the machine's processors and memory are among them.
        gpu: Whether those of its GPUs are.
        interval_ms: How often those two are read at most, in milliseconds.
        counters: Whether Triton's counters count.
        first_responses: Whether there is Triton's histogram of first responses.
    """

    address: str = "0.0.0.0"
    port: int = 8002
    cpu: bool = True
    gpu: bool = True
    interval_ms: int = 2000
    counters: bool = True
    first_responses: bool = False

    @property
    def reuse_port(self) -> bool:
        """Other processes may not listen on the same port."""
        return False

    @property
    def target(self) -> str:
        """The address as Triton writes it."""
        bare = ":" in self.address and not self.address.startswith("[")
        return f"[{self.address}]:{self.port}" if bare else f"{self.address}:{self.port}"


def read_settings(settings: Iterable[str]) -> tuple[bool, bool]:
    """Reads Triton's ``--metrics-config``.

    Args:
        settings: Each of the form ``<setting>=<value>``.

    Returns:
        Whether Triton's counters count, and whether there is its histogram of first responses.

    Raises:
        ValueError: One is malformed, unknown, or asks for what there is not; the text says which.
    """
    wanted = {_COUNTERS: True, _FIRST_RESPONSES: False, _OFF_ONLY: False}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not (key and equals and value) or "," in key:
            raise ValueError(f"--metrics-config option format is '<setting>=<value>'. Got {setting}")
        if key == _SUMMARY:
            continue  # how the summaries are to be, if there are to be some
        if key not in wanted:
            raise ValueError(
                f"--metrics-config: unknown setting '{key}'; there are {', '.join(wanted)} and {_SUMMARY}"
            )
        on = _BOOLEANS.get(value.lower())
        if on is None:
            raise ValueError(f"--metrics-config: {key} must be true or false, got '{value}'")
        wanted[key] = on
        if wanted[_OFF_ONLY]:
            raise ValueError(
                f"--metrics-config: {key}=true is not supported; quantiles can be had of the histograms "
                f"conch_*_duration_seconds, which are always there"
            )
    return wanted[_COUNTERS], wanted[_FIRST_RESPONSES]
