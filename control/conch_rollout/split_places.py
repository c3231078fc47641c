"""Places of a split: which version each key of [0, `WHOLE`) has. Pure."""

from __future__ import annotations

from itertools import groupby

Places = tuple[tuple[int, int], ...]
"""Versions in the order of their places, each with how many it has there; a version may occur again."""


def first_places(split: Places) -> Places:
    """The places of a new split: those of the stable version, which is its first, are the last."""
    return (*split[1:], split[0])


def moved_places(places: Places, split: Places) -> Places:
    """The places of a split that had others: as few change their version as the shares need.

    So a version whose share grows keeps all its keys, and one whose share falls gets no other keys.
    """
    stable = split[0][0]
    owners: list[int | None] = [version for version, count in places for _ in range(count)]
    for version, share in split:
        mine = [place for place, owner in enumerate(owners) if owner == version]
        surplus = max(len(mine) - share, 0)
        # Stable's first and the others' last, so that two versions have one boundary.
        for place in mine[:surplus] if version == stable else mine[len(mine) - surplus :]:
            owners[place] = None
    lacks = (version for version, share in split for _ in range(share - owners.count(version)))
    found = [next(lacks) if owner is None else owner for owner in owners]
    runs = tuple((version, len(list(run))) for version, run in groupby(found))
    return (*runs, *((version, 0) for version, share in split if not share))
