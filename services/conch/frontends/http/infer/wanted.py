"""How a client wants to have its outputs."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Wanted:
    """Which outputs are sent in binary form, the others as JSON.

    Attributes:
        binary: Whether those are that are not named.
        named: Outputs by name.
    """

    binary: bool
    named: dict[str, bool] = field(default_factory=dict)
