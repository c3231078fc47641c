"""Number of examples that property tests try.

``HYPOTHESIS_PROFILE`` names the profile: `dev` (15 examples, the default), `ci` (100) or `nightly` (1,000).
Tests with a number of their own state it for `ci`; `scaled` turns it into that of the profile.
"""

from __future__ import annotations

import os

from hypothesis import Phase, settings

PROFILES = {"dev": 15, "ci": 100, "nightly": 1000}
FAULTS = "faults"
_FEWEST = 5


def load() -> None:
    """Registers the profiles and loads the one that the environment names."""
    for name, examples in PROFILES.items():
        settings.register_profile(name, max_examples=examples, deadline=None)
    # `scripts/planted_faults.py` asks whether a test fails: the same each time, without the smallest example.
    phases = (Phase.explicit, Phase.generate)
    settings.register_profile(
        FAULTS, max_examples=PROFILES["dev"], deadline=None, derandomize=True, database=None, phases=phases
    )
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))


def scaled(examples: int) -> int:
    """The number of examples in the loaded profile of a test that tries so many in `ci`."""
    return max(_FEWEST, examples * settings().max_examples // PROFILES["ci"])
