"""The agent's data classes survive the way through the messages of the ModelControl service."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conch.core.errors import InternalError, InvalidArgumentError
from conch.protocol import model_control_pb2 as pb
from conch_control.agent_api import Index, InstanceStatus, ModelDescription, ModelStatus, VersionStatus
from conch_control.events import Event
from conch_control.remote_api.messages import (
    description_message,
    description_of,
    event_message,
    event_of,
    index_message,
    index_of,
    load_parameters,
    load_request,
    status_message,
)
from conch_control.version_phase import Phase

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
INT64 = st.integers(-(2**63), 2**63 - 1)
INT32 = st.integers(-(2**31), 2**31 - 1)
REVISIONS = st.integers(0, 2**64 - 1)
SECONDS = st.floats(allow_nan=False)
PHASES = st.sampled_from(Phase)
VERSIONS = st.builds(
    VersionStatus, INT64, PHASES, TEXTS, SECONDS, st.none() | INT64, done_bytes=INT64, total_bytes=INT64
)
MODELS = st.builds(
    ModelStatus,
    TEXTS,
    TEXTS,
    st.lists(VERSIONS, max_size=4).map(tuple),
    TEXTS,
    st.dictionaries(TEXTS, INT64, max_size=4),
)
INSTANCES = st.builds(InstanceStatus, TEXTS, TEXTS, INT32, INT32)


def travelled(message: Any) -> Any:
    return type(message).FromString(message.SerializeToString())


@given(st.builds(Event, REVISIONS, TEXTS, INT64, PHASES, TEXTS, SECONDS))
def test_events(event: Event) -> None:
    assert event_of(travelled(event_message(event))) == event


@given(st.builds(Index, TEXTS, REVISIONS, st.lists(MODELS, max_size=4).map(tuple), st.booleans()))
def test_indexes(index: Index) -> None:
    assert index_of(travelled(index_message(index))) == index


@given(
    st.builds(
        ModelDescription,
        MODELS,
        TEXTS,
        st.dictionaries(TEXTS, TEXTS, max_size=4),
        st.lists(INSTANCES, max_size=4).map(tuple),
    )
)
def test_descriptions(description: ModelDescription) -> None:
    assert description_of(travelled(description_message(description))) == description


@given(TEXTS, st.dictionaries(TEXTS, st.booleans() | INT64 | TEXTS | st.binary(max_size=20), max_size=4))
def test_loads(name: str, parameters: dict[str, bool | int | str | bytes]) -> None:
    request = pb.LoadRequest.FromString(load_request(name, parameters).SerializeToString())
    assert request.model == name
    found = load_parameters(request)
    assert found == parameters
    assert {key: type(value) for key, value in found.items()} == {
        key: type(value) for key, value in parameters.items()
    }


def test_what_no_message_can_carry() -> None:
    status = status_message(ModelStatus("m", "/models/\udcff"))
    assert status.location == "/models/\\udcff"
    with pytest.raises(InvalidArgumentError, match="load parameter 'n' must fit into 64 bits"):
        load_request("m", {"n": 2**63})


def test_a_parameter_without_a_value() -> None:
    request = pb.LoadRequest(model="m")
    request.parameters["config"].SetInParent()
    with pytest.raises(InvalidArgumentError, match="load parameter 'config' has no value"):
        load_parameters(request)


@pytest.mark.parametrize("number", [0, 99])
def test_a_phase_that_is_not_known(number: int) -> None:
    message = pb.Event.FromString(b"\x20" + bytes([number]))
    with pytest.raises(InternalError, match=f"it knows a phase {number}"):
        event_of(message)


def test_every_phase_has_its_number() -> None:
    numbers = {event_message(Event(1, "m", 1, phase, "", 0.0)).phase for phase in Phase}
    assert numbers == set(pb.Phase.values()) - {pb.PHASE_UNSPECIFIED}
