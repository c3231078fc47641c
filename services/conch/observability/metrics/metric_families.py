"""Metric families, histogram buckets and their text; pure.

prometheus_client takes about 4 µs a sample, and a server with hundreds of models has tens of thousands. So
`Template` renders whole families: it holds all samples of a family, without a model's labels and values.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from conch.core.custom_metrics import label_name

Kind = Literal["counter", "gauge", "histogram", "summary", "unknown"]

EXPONENTS = (*range(15, 31), 32, 34, 36)
"""Bounds of times are these powers of two in nanoseconds: 33 µs to 1.1 s, then 4.3, 17, 69 s."""
LONG_EXPONENTS = tuple(range(20, 42, 2))
"""The same for long times: 1 ms to 18 minutes in steps of four."""
SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
"""Bounds of batch sizes."""

_TOTAL = "_total"
_BEFORE, _AFTER, _ALL = "\0", "\1", "\2"


@dataclass(frozen=True, slots=True)
class Family:
    """A family of metrics.

    The name of a counter ends in ``_total`` unless it is Triton's; its samples have the same name.
    """

    name: str
    kind: Kind
    help: str

    def header(self, openmetrics: bool) -> str:
        """The two lines before the samples.

        OpenMetrics requires names of counters to end in ``_total``. Triton's do not and must stay, so their
        type is unknown there.
        """
        name, kind = self.name, self.kind
        if openmetrics and kind == "counter":
            if name.endswith(_TOTAL):
                name = name.removesuffix(_TOTAL)
            else:
                kind = "unknown"
        return f"# HELP {name} {escaped_help(self.help)}\n# TYPE {name} {kind}\n"


def escaped_help(text: str) -> str:
    """A help text, escaped for both formats."""
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def escaped(value: str) -> str:
    """A label value, escaped for both formats, without quotes."""
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def labels(pairs: Mapping[str, str]) -> str:
    """Labels in alphabetical order, without braces."""
    return ",".join(f'{name}="{escaped(value)}"' for name, value in sorted(pairs.items()))


def number(value: float) -> str:
    """A value in both formats."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(float(value))


def sample(name: str, value: float, pairs: Mapping[str, str] | None = None) -> str:
    """One line."""
    return f"{name}{{{labels(pairs)}}} {number(value)}\n" if pairs else f"{name} {number(value)}\n"


def counted(
    family: Family, label: str, counts: Mapping[str, int], others: Mapping[str, str] | None = None
) -> list[str]:
    """A line for each count, whose name is the value of a label."""
    return [
        sample(family.name, count, {label: name, **(others or {})}) for name, count in sorted(counts.items())
    ]


def model_labels(name: str, namespace: str) -> dict[str, str]:
    """The labels that identify a model: name, and namespace if names are not unique."""
    return {"model": name, "namespace": namespace} if namespace else {"model": name}


@dataclass(frozen=True, slots=True)
class ModelLabels:
    """The rendered labels of a model version: up to name and namespace, the version, and both."""

    before: str
    after: str
    all: str

    @classmethod
    def of(
        cls, name: str, version: int, tags: Mapping[str, str], namespace: str = "", gpu_uuid: str = ""
    ) -> ModelLabels:
        """The labels of a model version.

        Args:
            name: Model name.
            version: Model version.
            tags: ``metric_tags`` of the config; label names are the keys with ``_`` in front.
            namespace: Namespace of the model; empty if names are unique.
            gpu_uuid: The one GPU of all instances; empty for none or several.
        """
        own = {label_name(f"_{key}"): value for key, value in tags.items()}
        if gpu_uuid:
            own["gpu_uuid"] = gpu_uuid
        before = labels({**own, **model_labels(name, namespace)})
        after = labels({"version": str(version)})
        return cls(before, after, f"{before},{after}")


class Template:
    """The samples of one family of a model version, without its labels and values.

    Own labels of samples are placed as in Triton: in alphabetical order, ``le`` and ``quantile`` last.

    Args:
        family: The family.
        samples: Name suffix, own label and its value (empty for none), in the order of the values.
    """

    def __init__(self, family: Family, samples: Iterable[tuple[str, str, str]] = (("", "", ""),)) -> None:
        self.family = family
        self._text = "".join(_sample(family.name + suffix, label, value) for suffix, label, value in samples)

        self._apart = _BEFORE in self._text

    def render(self, model: ModelLabels, values: Sequence[object]) -> str:
        """The samples of a model version, with a value for each."""
        # Labels last: they may contain a percent sign.
        text = (self._text % (*values,)).replace(_ALL, model.all)
        return text.replace(_BEFORE, model.before).replace(_AFTER, model.after) if self._apart else text


def _sample(name: str, label: str, value: str) -> str:
    own = f'{label}="{escaped(value)}"'.replace("%", "%%")
    if not label:
        inside = _ALL
    elif label in ("le", "quantile"):
        inside = f"{_ALL},{own}"
    else:
        inside = f"{_BEFORE},{own},{_AFTER}"
    return f"{name}{{{inside}}} %s\n"


def bounds(upper: Sequence[float]) -> tuple[str, ...]:
    """Upper bounds as labels, ``+Inf`` included; numbers as prometheus-cpp, and so Triton, writes them."""
    return (*(f"{bound:.16g}" for bound in upper), "+Inf")


def in_seconds(exponents: Sequence[int]) -> tuple[float, ...]:
    """Bounds in seconds."""
    return tuple(2**exponent / 1e9 for exponent in exponents)


def times(places: Sequence[int], exponents: Sequence[int] = EXPONENTS) -> list[int]:
    """Cumulative counts of times: one for each bound, 2**exponent nanoseconds, and one for all.

    Place n counts times from 2**(n-1) to below 2**n ns, so a time of exactly a bound is in the next bucket.
    """
    below = list(accumulate(places))
    return [*(below[exponent] for exponent in exponents), below[-1]]


def sizes(executions: Mapping[int, int]) -> list[int]:
    """Cumulative counts of batch sizes from executions by size: one for each bound and one for all."""
    return [
        *(sum(count for size, count in executions.items() if size <= bound) for bound in SIZES),
        sum(executions.values()),
    ]
