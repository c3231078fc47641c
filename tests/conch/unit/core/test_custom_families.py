"""Families of models whose names are too much alike."""

from __future__ import annotations

import pytest

from conch.core.custom_metrics import CustomFamilies
from conch.core.errors import InvalidArgumentError


@pytest.mark.parametrize(
    ("there", "new"),
    [
        (("a", "histogram"), ("a_count", "counter")),
        (("a_count", "gauge"), ("a", "histogram")),
        (("a_total", "counter"), ("a", "gauge")),
        (("a", "counter"), ("a_total", "gauge")),
        (("a", "counter"), ("a_total", "counter")),
    ],
)
def test_samples_of_two_families_never_have_one_name(there: tuple[str, str], new: tuple[str, str]) -> None:
    families = CustomFamilies()
    kept = families.family(there[0], there[1], "")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match=f"'{new[0]}' would have samples .* '{there[0]}'"):
        families.family(new[0], new[1], "")  # type: ignore[arg-type]
    assert [family.name for family in families.snapshot()] == [kept.name]
    del kept
    again = families.family(new[0], new[1], "")  # type: ignore[arg-type]
    assert again.name == new[0]
