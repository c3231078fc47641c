"""Golden requests: inputs with the outputs that a model must give for them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ATOL = 1e-4
NATIVE = "a template gives one in a DAG with render_template_as_native_obj=True"


@dataclass(frozen=True, slots=True)
class Golden:
    """A golden request.

    Attributes:
        inputs: As in the JSON of an inference request.
        outputs: Expected elements by name, nested or flat.
        atol: The largest difference of numbers.
    """

    inputs: Sequence[Mapping[str, Any]]
    outputs: Mapping[str, Any]
    atol: float = ATOL

    @classmethod
    def read(cls, verify: Mapping[str, Any]) -> Golden:
        """Reads an operator's argument ``verify``.

        Raises:
            ValueError: It is no dictionary, or a field is missing or unknown.
        """
        if not isinstance(verify, Mapping):
            raise ValueError(f"verify: must be a dictionary, not {verify!r}; {NATIVE}")
        if unknown := sorted(verify.keys() - {"inputs", "outputs", "atol"}):
            raise ValueError(f"verify: unknown field '{unknown[0]}'; there are inputs, outputs and atol")
        if missing := sorted({"inputs", "outputs"} - verify.keys()):
            raise ValueError(f"verify: the field '{missing[0]}' is missing")
        return cls(verify["inputs"], verify["outputs"], float(verify.get("atol", ATOL)))

    def difference(self, answered: Mapping[str, Any]) -> str:
        """The first difference between expected and answered outputs; empty if there is none."""
        for name, expected in self.outputs.items():
            if name not in answered:
                return f"there is no output '{name}', only {', '.join(sorted(answered)) or 'none'}"
            wanted, found = list(_flat(expected)), list(_flat(answered[name]))
            if len(wanted) != len(found):
                return f"output '{name}' has {len(found)} elements, expected {len(wanted)}"
            for position, (one, other) in enumerate(zip(wanted, found, strict=True)):
                if not self._equal(one, other):
                    return f"output '{name}' has {other!r} at {position}, expected {one!r}"
        return ""

    def _equal(self, wanted: Any, found: Any) -> bool:
        if not (_is_number(wanted) and _is_number(found)):
            return type(wanted) is type(found) and bool(wanted == found)
        return (
            wanted == found or abs(wanted - found) <= self.atol or (math.isnan(wanted) and math.isnan(found))
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for each in value:
            yield from _flat(each)
    else:
        yield value
