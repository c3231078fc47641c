"""Options of the metrics port, and the parser of ``--metrics-config``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from ssl import SSLContext

from conch.observability.exporters import ExportOptions

_BOOLEANS = {"true": True, "on": True, "1": True, "false": False, "off": False, "0": False}
_COUNTERS = "counter_latencies"
_FIRST_RESPONSES = "histogram_latencies"
_SUMMARIES = "summary_latencies"
_QUANTILES_KEY = "summary_quantiles"
_NUMBER = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)
_QUANTILES: tuple[float, ...] = (0.5, 0.9, 0.95, 0.99, 0.999)


@dataclass(frozen=True, slots=True)
class MetricsOptions:
    """Options of the metrics port.

    Attributes:
        port: Port to listen on; 0 for any free one.
        cpu: Whether to include processors and memory of the machine.
        gpu: Whether to include GPUs.
        interval_ms: Minimum milliseconds between reads of those two.
        counters: Whether Triton's counters count; else durations are left out and the others stay 0.
        first_responses: Whether to include Triton's histogram of first responses.
        quantiles: Quantiles of Triton's summaries; empty for no summaries.
        tls: Makes the TLS context; None for plain text.
        export: Where metrics are also exported to; None for nowhere.
    """

    address: str = "0.0.0.0"
    port: int = 8002
    cpu: bool = True
    gpu: bool = True
    interval_ms: int = 2000
    counters: bool = True
    first_responses: bool = False
    quantiles: tuple[float, ...] = ()
    tls: Callable[[], SSLContext] | None = None
    export: ExportOptions | None = None

    @property
    def reuse_port(self) -> bool:
        """Always false: the port is not shared."""
        return False

    @property
    def target(self) -> str:
        """The address as Triton writes it."""
        bare = ":" in self.address and not self.address.startswith("[")
        return f"[{self.address}]:{self.port}" if bare else f"{self.address}:{self.port}"


@dataclass(frozen=True, slots=True)
class MetricsSettings:
    """The values of ``--metrics-config``, as in `MetricsOptions`."""

    counters: bool = True
    first_responses: bool = False
    quantiles: tuple[float, ...] = ()


def read_settings(settings: Iterable[str]) -> MetricsSettings:
    """Parses Triton's ``--metrics-config``, texts of the form ``<setting>=<value>``.

    Raises:
        ValueError: One is malformed or unknown; the text says which.
    """
    wanted = {_COUNTERS: True, _FIRST_RESPONSES: False, _SUMMARIES: False}
    quantiles = _QUANTILES
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not (key and equals and value) or "," in key:
            raise ValueError(f"--metrics-config option format is '<setting>=<value>'. Got {setting}")
        if key == _QUANTILES_KEY:
            quantiles = _read_quantiles(value)
            continue
        if key not in wanted:
            known = ", ".join((*wanted, _QUANTILES_KEY))
            raise ValueError(f"--metrics-config: unknown setting '{key}'; there are {known}")
        on = _BOOLEANS.get(value.lower())
        if on is None:
            raise ValueError(f"--metrics-config: {key} must be true or false, got '{value}'")
        wanted[key] = on
    return MetricsSettings(
        wanted[_COUNTERS], wanted[_FIRST_RESPONSES], quantiles if wanted[_SUMMARIES] else ()
    )


def _read_quantiles(value: str) -> tuple[float, ...]:
    """The quantiles of ``<quantile>:<error>`` pairs; conch's error is below any requested one."""
    found: set[float] = set()
    for pair in value.split(","):
        quantile, _, error = pair.partition(":")
        if not all(0 <= _leading_number(text) <= 1 for text in (quantile, error)):
            raise ValueError(
                f"--metrics-config: {_QUANTILES_KEY} must be <quantile>:<error>,..., both from 0 to 1, got "
                f"'{value}'"
            )
        found.add(_leading_number(quantile))
    return tuple(sorted(found))


def _leading_number(text: str) -> float:
    """The number at the start of a text, as C++ parses it (``0.0.1`` is 0.0); -1 for none."""
    found = _NUMBER.match(text)
    return -1.0 if found is None else float(found[0])
