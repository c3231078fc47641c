"""Placement of models on servers: its invariants, and the contents of placement files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conch.core.errors import InvalidArgumentError
from conch_fleet.placement import EVERYWHERE, Demand, Placement, Room, place
from conch_fleet.placement_file import FleetServer, PlacementRules, Rule, read_placement

SERVERS = ("a", "b", "c", "d")
MODELS = ("m", "n", "o", "p", "q")
LABELS = st.dictionaries(st.sampled_from(["gpu", "zone"]), st.sampled_from(["1", "2"]), max_size=1)
ADDRESSES = st.lists(st.sampled_from(SERVERS), unique=True, max_size=4)


@st.composite
def demands(draw: st.DrawFn) -> dict[str, Demand]:
    found = {}
    for number, name in enumerate(MODELS[: draw(st.integers(1, len(MODELS)))]):
        held = tuple(draw(ADDRESSES))
        found[name] = Demand(
            draw(st.sampled_from([EVERYWHERE, 1, 2, 3])),
            draw(LABELS),
            draw(st.integers(0, 5)),
            tuple(draw(st.lists(st.sampled_from(MODELS[:number]), max_size=2))) if number else (),
            held,
            frozenset(held),
        )
    return found


@st.composite
def rooms(draw: st.DrawFn) -> list[Room]:
    return [
        Room(
            address,
            draw(LABELS),
            draw(st.none() | st.integers(0, 15)),
            draw(st.integers(0, 3)),
            frozenset(draw(st.sets(st.sampled_from(MODELS), max_size=1))),
            draw(st.sampled_from([False, False, True])),
        )
        for address in SERVERS[: draw(st.integers(0, len(SERVERS)))]
    ]


def decided(demands: dict[str, Demand], placement: Placement) -> dict[str, Demand]:
    """The demands once the servers have what was decided."""
    return {
        name: replace(each, keep=placement.servers[name], held=frozenset(placement.servers[name]))
        for name, each in demands.items()
    }


def placed_as_part(name: str, demands: dict[str, Demand], placement: Placement) -> set[str]:
    """The servers of the ensembles that a model is in."""
    around = {other for other, each in demands.items() if name in each.parts}
    direct = {server for other in around for server in placement.servers[other]}
    return direct.union(*(placed_as_part(other, demands, placement) for other in around))


@given(demands(), rooms())
def test_what_always_holds(demands: dict[str, Demand], rooms: list[Room]) -> None:
    placement = place(demands, rooms)
    by_address = {room.address: room for room in rooms}
    for room in rooms:
        size = sum(demands[name].bytes for name in demands if room.address in placement.servers[name])
        assert room.memory is None or size == 0 or size + room.used <= room.memory, "memory is never exceeded"
    for name, demand in demands.items():
        servers = placement.servers[name]
        for each in demand.parts:
            assert set(servers) <= set(placement.servers[each]), "parts are where their ensemble is"
        closed = {room.address for room in rooms if room.closed}
        if not placed_as_part(name, demands, placement):
            assert set(servers) & closed <= set(demand.keep), "closed servers get nothing more"
        for address in set(servers) - placed_as_part(name, demands, placement):
            room = by_address[address]
            assert demand.labels.items() <= room.labels.items(), "labels are obeyed"
            assert name not in room.refused
        if demand.replicas is not EVERYWHERE and not placed_as_part(name, demands, placement):
            assert len(servers) <= demand.replicas
        short = len(servers) < (demand.replicas or 1)
        assert not short or placement.problems[name], "what is short has a reason"
        if demand.replicas is EVERYWHERE and name not in placement.problems:
            allowed = {room.address for room in rooms if demand.labels.items() <= room.labels.items()}
            refusing = {room.address for room in rooms if room.refused or room.closed}
            assert allowed - refusing <= set(servers)


@given(demands(), rooms())
def test_replicas_are_honoured_where_there_is_room(demands: dict[str, Demand], rooms: list[Room]) -> None:
    endless = [replace(room, memory=None, refused=frozenset(), closed=False) for room in rooms]
    placement = place(demands, endless)
    for name, demand in demands.items():
        allowed = sum(demand.labels.items() <= room.labels.items() for room in endless)
        wanted = allowed if demand.replicas is EVERYWHERE else min(demand.replicas, allowed)
        assert len(placement.servers[name]) >= wanted


@given(demands(), rooms())
def test_what_is_decided_stays(demands: dict[str, Demand], rooms: list[Room]) -> None:
    # Copies that are to go may have stood in the way of others; then it is final.
    once = decided(demands, place(demands, rooms))
    settled = place(once, rooms)
    again = place(decided(once, settled), rooms)
    assert again == settled
    for name in demands:
        assert set(once[name].keep) <= set(settled.servers[name])


@given(demands(), rooms(), st.integers(0, 5))
def test_a_further_model_or_server_moves_nothing(
    demands: dict[str, Demand], rooms: list[Room], size: int
) -> None:
    # Parts follow their ensembles, which may go to the further server.
    demands = {name: replace(each, parts=()) for name, each in demands.items()}
    settled = decided(demands, place(demands, rooms))
    more = place({**settled, "z": Demand(1, bytes=size)}, [*rooms, Room("z")])
    for name, demand in settled.items():
        assert set(demand.keep) <= set(more.servers[name])
        if demand.replicas is not EVERYWHERE and len(demand.keep) >= demand.replicas:
            assert more.servers[name] == place(settled, rooms).servers[name]


def test_reasons() -> None:
    rooms = [
        Room("a", {"gpu": "true"}, 10, used=4),
        Room("b", {}, 100),
        Room("c", {"gpu": "true"}, refused=frozenset({"m"})),
    ]
    demand = Demand(2, {"gpu": "true"}, 7)
    assert place({"m": demand}, rooms).problems == {
        "m": "0 of 2 copies placed: a has 6 B free and 7 B are needed; b has not the label gpu = 'true'; "
        "m was unloaded from c by others"
    }
    everywhere = place({"m": Demand(labels={"gpu": "true"}, bytes=7_500_000_000)}, rooms)
    assert everywhere.problems["m"].startswith(
        "0 of all copies placed: a has 6 B free and 7.5 GB are needed; b "
    )
    everywhere = place({"m": Demand(bytes=7)}, rooms)
    assert (everywhere.servers["m"], everywhere.problems["m"]) == (
        ("b",),
        "1 of all copies placed: a has 6 B free and 7 B are needed",
    )
    assert place({"m": Demand(5)}, rooms[:2]).problems == {
        "m": "2 of 5 copies placed: there are only 2 servers"
    }
    assert place({"m": Demand()}, []).problems == {"m": "0 of all copies placed: there is no server"}
    assert place({"m": Demand(1, bytes=5), "n": Demand(1)}, rooms[:2]).servers == {"m": ("a",), "n": ("b",)}
    leaving = Demand(1, {"gpu": "true"}, 7, held=frozenset("b"))
    assert (
        place({"m": leaving, "n": Demand(1, bytes=95)}, rooms[:2])
        .problems["n"]
        .endswith("b has 93 B free and 95 B are needed")
    )


# --- files


def written(directory: Path, text: str) -> Path:
    path = directory / "placement.toml"
    path.write_text(text)
    return path


def test_a_file(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        """
        [[server]]
        address = "10.0.0.1:8003"
        labels = { gpu = "true" }
        memory = "1.5GB"
        token_file = "a.token"
        server_name = "a"
        [[server]]
        address = "unix:/b"
        [[model]]
        name = "resnet*"
        replicas = 2
        labels = { gpu = "true" }
        memory = "512 MiB"
        [[model]]
        name = "r*"
        replicas = "everywhere"
        [[model]]
        name = "tenant-*"
        residency = true
        """,
    )
    connection = {"token_file": str(tmp_path / "a.token"), "server_name": "a"}
    rules = read_placement(path)
    assert rules.servers == (
        FleetServer("10.0.0.1:8003", {"gpu": "true"}, 1_500_000_000, connection),
        FleetServer("unix:/b"),
    )
    assert rules.rule_of("resnet50") == Rule("resnet*", 2, {"gpu": "true"}, 512 << 20)
    assert rules.rule_of("/models::resnet50").replicas == 2
    assert rules.rule_of("retina") == Rule("r*")
    assert rules.loads("retina") and not rules.loads("tenant-7")
    assert rules.rule_of("other") == PlacementRules().rule_of("x") == Rule("*")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("[", "is not TOML"),
        ("models = 1", "models: unknown field; known are server, model"),
        ("model = 1", r"model: must be tables, each begun with \[\[model\]\]"),
        ("[[model]]", r"model\[0\].name: must be a text; it is missing"),
        ("[[server]]\naddress = 1", r"server\[0\].address: must be a text$"),
        (
            "[[server]]\naddress = 'a:1'\ngpu = true",
            r"server\[0\].gpu: unknown field; known are address, labels",
        ),
        ("[[server]]\naddress = 'a:1'\n[[server]]\naddress = 'a:1'", "server.address: 'a:1' is given twice"),
        ("[[model]]\nname = 'm'\n[[model]]\nname = 'm'", "model.name: 'm' is given twice"),
        (
            "[[model]]\nname = 'm'\nreplicas = 0",
            r"model\[0\].replicas: must be a number from 1 or 'everywhere', not 0",
        ),
        ("[[model]]\nname = 'm'\nreplicas = true", r"model\[0\].replicas: must be a number"),
        (
            "[[model]]\nname = 'm'\nmemory = 5",
            r'model\[0\].memory: must be a size such as "2GB" or "512MiB", not 5',
        ),
        ("[[model]]\nname = 'm'\nresidency = 1", r"model\[0\].residency: must be true or false, not 1"),
        (
            "[[model]]\nname = 'm'\nresidency = true\nreplicas = 2",
            r"model\[0\].replicas: has no effect with residency = true",
        ),
        ("[[model]]\nname = 'm'\nmemory = '2 gb'", r"model\[0\].memory: must be a size"),
        ("[[model]]\nname = 'm'\nlabels = {gpu = true}", r"model\[0\].labels: must be a table of texts"),
    ],
)
def test_mistakes_in_a_file(tmp_path: Path, text: str, error: str) -> None:
    with pytest.raises(InvalidArgumentError, match=error) as raised:
        read_placement(written(tmp_path, text))
    assert str(tmp_path / "placement.toml") in raised.value.message


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="can't be read: No such file"):
        read_placement(tmp_path / "no.toml")
