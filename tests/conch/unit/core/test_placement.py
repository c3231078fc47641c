"""Instance groups: defaults, rules and the instances they stand for, with no GPU, one and eight."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conch.core.errors import InvalidArgumentError
from conch.core.execution.placement import MOST_INSTANCES, Devices, Placement, counts_by_kind, place, resolve
from conch.core.spec import InstanceGroup, Resource

NONE, ONE, EIGHT = Devices(), Devices((0,)), Devices(tuple(range(8)))
AUTO = InstanceGroup("", "AUTO", 0)
ALL = tuple(range(8))


@pytest.mark.parametrize(
    ("devices", "group", "kind", "count", "gpus"),
    [
        (NONE, AUTO, "CPU", 2, ()),
        (ONE, AUTO, "GPU", 1, (0,)),
        (EIGHT, AUTO, "GPU", 1, ALL),
        (EIGHT, replace(AUTO, count=3), "GPU", 3, ALL),
        (EIGHT, replace(AUTO, gpus=(5, 1)), "GPU", 1, (5, 1)),
        (NONE, replace(AUTO, count=3), "CPU", 3, ()),
        (NONE, replace(AUTO, kind="CPU"), "CPU", 2, ()),
        (EIGHT, replace(AUTO, kind="CPU"), "CPU", 2, ()),
        (EIGHT, replace(AUTO, kind="MODEL"), "MODEL", 1, ()),
        (ONE, replace(AUTO, kind="GPU", count=4), "GPU", 4, (0,)),
        (EIGHT, replace(AUTO, kind="GPU", gpus=(7,)), "GPU", 1, (7,)),
        (Devices((1, 3)), replace(AUTO, kind="GPU"), "GPU", 1, (1, 3)),
    ],
)
def test_defaults(
    devices: Devices, group: InstanceGroup, kind: str, count: int, gpus: tuple[int, ...]
) -> None:
    (resolved,) = resolve("m", [group], devices, cpu_count=2)
    assert resolved == replace(group, name="m_0", kind=kind, count=count, gpus=gpus)
    assert resolve("m", [resolved], devices, cpu_count=2) == (resolved,)


def test_a_config_without_groups_has_one_that_is_named_after_the_model() -> None:
    assert resolve("m", [], NONE, cpu_count=2) == (InstanceGroup("m", "CPU", 2),)
    assert resolve("m", [], EIGHT) == (InstanceGroup("m", "GPU", 1, ALL),)
    assert resolve("m", [], EIGHT, allows_gpus=False) == (InstanceGroup("m", "CPU", 1),)


def test_names_and_everything_else_that_is_given_stay() -> None:
    given_group = InstanceGroup("g", "MODEL", 2, (), True, ("p",), (Resource("R", 1),), 7)
    assert resolve("m", [AUTO, given_group, AUTO], NONE) == (
        InstanceGroup("m_0", "CPU", 1),
        given_group,
        InstanceGroup("m_2", "CPU", 1),
    )


UNSUPPORTED = (
    "specifies invalid or unsupported gpu id {}. GPUs with at least the minimum required CUDA compute "
    "compatibility of {} are: {}"
)


@pytest.mark.parametrize(
    ("devices", "group", "problem"),
    [
        (NONE, replace(AUTO, kind="GPU"), "has kind KIND_GPU but no GPUs are available"),
        (NONE, replace(AUTO, kind="GPU", gpus=(0,)), UNSUPPORTED.format(0, "6.000000", "")),
        (ONE, replace(AUTO, kind="GPU", gpus=(42,)), UNSUPPORTED.format(42, "6.000000", "0")),
        (ONE, replace(AUTO, kind="GPU", gpus=(0, -1)), UNSUPPORTED.format(-1, "6.000000", "0")),
        (
            Devices((0, 2), 7.5),
            replace(AUTO, kind="GPU", gpus=(1,)),
            UNSUPPORTED.format(1, "7.500000", "0, 2"),
        ),
        (ONE, replace(AUTO, kind="CPU", gpus=(0,)), "has kind KIND_CPU but specifies one or more GPUs"),
        (ONE, replace(AUTO, kind="MODEL", gpus=(0,)), "has kind KIND_MODEL but specifies one or more GPUs"),
        (NONE, replace(AUTO, gpus=(0,)), "has kind KIND_CPU but specifies one or more GPUs"),
        (ONE, replace(AUTO, gpus=(0, 1)), "has kind KIND_CPU but specifies one or more GPUs"),
    ],
)
def test_groups_that_can_not_be_placed(devices: Devices, group: InstanceGroup, problem: str) -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        resolve("m", [replace(AUTO, name="ok", kind="MODEL"), group], devices)
    assert raised.value.message == f"instance group m_1 of model m {problem}"


groups_strategy = st.lists(
    st.builds(
        InstanceGroup,
        st.sampled_from(["", "a", "b"]),
        st.sampled_from(["AUTO", "CPU", "GPU", "MODEL"]),
        st.integers(0, 4),
        st.lists(st.integers(-1, 8), max_size=3, unique=True).map(tuple),
        st.booleans(),
    ),
    max_size=4,
)


@given(groups_strategy, st.sampled_from([NONE, ONE, EIGHT]), st.integers(1, 3), st.booleans())
def test_whatever_is_configured(
    groups: list[InstanceGroup], devices: Devices, cpu_count: int, allows_gpus: bool
) -> None:
    try:
        resolved = resolve("m", groups, devices, cpu_count, allows_gpus)
    except InvalidArgumentError as error:
        assert "instance group " in error.message
        return
    assert resolve("m", resolved, devices, cpu_count, allows_gpus) == resolved
    assert len(resolved) == max(len(groups), 1)
    for group in resolved:
        placements = place([group])
        assert len(placements) == group.count * (len(group.gpus) if group.kind == "GPU" else 1) > 0
        assert len({(each.name, each.device_id) for each in placements}) == len(placements)
        for each in placements:
            assert each.kind == group.kind != "AUTO"
            assert each.name.startswith(f"{group.name}_")
            assert each.device_id in (devices.gpus if each.kind == "GPU" else (0,))
            assert each.passive is group.passive


def test_what_an_instance_is_told() -> None:
    resources = (Resource("R", 2),)
    group = InstanceGroup("g", "GPU", 2, (1, 0), True, ("p", "q"), resources, 3)
    assert place([InstanceGroup("h"), group]) == [
        Placement("h_0", "CPU"),
        Placement("g_0", "GPU", 1, True, ("p", "q"), resources, 3),
        Placement("g_0", "GPU", 0, True, ("p", "q"), resources, 3),
        Placement("g_1", "GPU", 1, True, ("p", "q"), resources, 3),
        Placement("g_1", "GPU", 0, True, ("p", "q"), resources, 3),
    ]


@pytest.mark.parametrize(
    ("changed", "counts"),
    [
        ([InstanceGroup("g"), InstanceGroup("h", count=2)], [3]),
        ([InstanceGroup("other", count=3)], [3]),
        ([InstanceGroup("g", count=7), InstanceGroup("h", count=2)], [9]),
        ([InstanceGroup("g", kind="MODEL"), InstanceGroup("h", count=2)], [1, 2]),
        ([InstanceGroup("g", passive=True), InstanceGroup("h", count=2)], [1, 2]),
        ([InstanceGroup("g", priority=2), InstanceGroup("h", count=2)], [1, 2]),
        ([InstanceGroup("g", profiles=("p",)), InstanceGroup("h", count=2)], [1, 2]),
        ([InstanceGroup("g", "GPU", 2, (0, 1))], [2, 2]),
    ],
)
def test_kinds_of_instances(changed: list[InstanceGroup], counts: list[int]) -> None:
    """Names of groups, and how instances are spread over groups, make no difference."""
    assert list(counts_by_kind(changed).values()) == counts


def test_the_same_gpus_in_other_groups() -> None:
    apart = [InstanceGroup("g", "GPU", 2, (1,)), InstanceGroup("h", "GPU", 2, (0,))]
    assert counts_by_kind(apart) == counts_by_kind([InstanceGroup("g", "GPU", 2, (0, 1))])


@pytest.mark.parametrize(("devices", "count"), [(NONE, MOST_INSTANCES), (EIGHT, MOST_INSTANCES // 8)])
def test_too_many_instances(devices: Devices, count: int) -> None:
    most = [replace(AUTO, count=count - 1), replace(AUTO, count=1)]
    assert sum(group.count for group in resolve("m", most, devices)) == count
    with pytest.raises(InvalidArgumentError, match=r"of model m ask for 2000000000 instances.*at most 1000"):
        resolve("m", [replace(AUTO, kind="CPU", count=2_000_000_000)], devices)
    with pytest.raises(InvalidArgumentError, match="at most 1000; lower 'count'"):
        resolve("m", [*most, AUTO], devices)
