"""Families of metrics and the text they become; pure.

prometheus_client renders some 4 µs a sample. A server with hundreds of models has tens of thousands of
samples, so those of models are rendered here, whole families at a time: `Template` holds all samples of a
family for one model, with the model's labels and the values left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from conch.core.custom_metrics import label_name

Kind = Literal["counter", "gauge", "histogram", "summary", "unknown"]

_TOTAL = "_total"
_BEFORE, _AFTER, _ALL = "\0", "\1", "\2"


@dataclass(frozen=True, slots=True)
class Family:
    """A family of metrics.

    Attributes:
        name: Its name; samples of counters have just this name, which ends in ``_total`` unless it is
            Triton's.
        kind: Its type.
        help: What it says, in a line.
    """

    name: str
    kind: Kind
    help: str

    def header(self, openmetrics: bool) -> str:
        """The two lines in front of its samples.

        In OpenMetrics the names of counters must end in ``_total``. Triton's do not, and must stay what they
        are in either format, so there they are of no known type.
        """
        name, kind = self.name, self.kind
        if openmetrics and kind == "counter":
            if name.endswith(_TOTAL):
                name = name.removesuffix(_TOTAL)
            else:
                kind = "unknown"
        return f"# HELP {name} {escaped_help(self.help)}\n# TYPE {name} {kind}\n"


def escaped_help(text: str) -> str:
    """Help as both formats have it."""
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def escaped(value: str) -> str:
    """The value of a label as both formats have it, without the quotes."""
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def labels(pairs: Mapping[str, str]) -> str:
    """Labels by name, in alphabetical order, without the braces."""
    return ",".join(f'{name}="{escaped(value)}"' for name, value in sorted(pairs.items()))


def number(value: float) -> str:
    """A value as both formats have it."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(float(value))


def sample(name: str, value: float, pairs: Mapping[str, str] | None = None) -> str:
    """One line."""
    return f"{name}{{{labels(pairs)}}} {number(value)}\n" if pairs else f"{name} {number(value)}\n"


def model_labels(name: str, namespace: str) -> dict[str, str]:
    """What tells a model from others: its name, and its namespace where names are not unique."""
    return {"model": name, "namespace": namespace} if namespace else {"model": name}


@dataclass(frozen=True, slots=True)
class ModelLabels:
    """The labels of one model version, rendered once.

    Attributes:
        before: Those up to the model's name and its namespace.
        after: The version.
        all: Both.
    """

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
            version: Its version.
            tags: What its config tags it with; the labels are named as the keys, with a ``_`` in front.
            namespace: What tells the model from others of its name; empty where names are unique.
            gpu_uuid: The GPU that all its instances are on; empty for none, or several.
        """
        own = {label_name(f"_{key}"): value for key, value in tags.items()}
        if gpu_uuid:
            own["gpu_uuid"] = gpu_uuid
        before = labels({**own, **model_labels(name, namespace)})
        after = labels({"version": str(version)})
        return cls(before, after, f"{before},{after}")


class Template:
    """All samples of one family that a model version has, but for its labels and the values.

    Labels of the samples' own stand where Triton has them: in alphabetical order, but ``le`` and ``quantile``
    last.

    Args:
        family: The family.
        samples: Suffix of the name, own label and its value (empty for none), in the order of the values.
    """

    def __init__(self, family: Family, samples: Iterable[tuple[str, str, str]] = (("", "", ""),)) -> None:
        self.family = family
        self._text = "".join(_sample(family.name + suffix, label, value) for suffix, label, value in samples)

        self._apart = _BEFORE in self._text

    def render(self, model: ModelLabels, values: Sequence[object]) -> str:
        """The samples of a model version.

        Args:
            model: Its labels.
            values: One for each sample.
        """
        # The labels last: they may hold a percent sign.
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
