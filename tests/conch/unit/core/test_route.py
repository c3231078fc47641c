"""Routes: shares are exact enough, grow without moving anyone, and one request sees one side."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conch.core.errors import InvalidArgumentError
from conch.core.request import InferenceRequest
from conch.core.route import WHOLE, Attribute, MatchRule, Route, route_salt

USERS = 100_000
USER = (Attribute("header", "x-user-id"),)
SALT = route_salt("ocr", "1")


class Version:
    """A version that has the sequences it is given."""

    def __init__(self, *sequences: int | str) -> None:
        self._sequences = sequences

    def continues(self, request: InferenceRequest) -> bool:
        return request.correlation_id in self._sequences


class Call:
    """A call with headers and a principal."""

    def __init__(self, headers: Mapping[str, str], principal: str = "") -> None:
        self._headers = headers
        self.access = SimpleNamespace(name=principal) if principal else None
        self.caller = self

    def header(self, name: str) -> str:
        return self._headers.get(name, "")


READY = {7: Version(), 8: Version()}
LABELS = {"champion": 7, "lost": 99}


def request(
    call: Call | None = None, sequence: int | str = 0, around: InferenceRequest | None = None, at: int = 0
) -> InferenceRequest:
    made = InferenceRequest("m", "", {}, lambda *answer: None, at)
    made.context = around or call
    made.correlation_id = sequence
    return made


def side(route: Route, ready: Mapping[int, Version] = READY, **made: object) -> int:
    return route.choose(request(**made), ready, LABELS)  # type: ignore[arg-type]


def at(share: int, salt: bytes = SALT) -> Route:
    return Route(7, 8, ((8, share),), salt, USER)


def users_of(*routes: Route) -> list[set[int]]:
    """The users that get the candidate of each route."""
    found: list[set[int]] = [set() for _ in routes]
    for user in range(USERS):
        for users, route in zip(found, routes, strict=True):
            if side(route, call=Call({"x-user-id": f"user-{user}"})) == 8:
                users.add(user)
    return found


def test_users_stay_while_the_share_grows_and_are_others_with_another_salt() -> None:
    """The overlap with another salt is what chance gives: the product of both shares."""
    few, more, others = users_of(at(500), at(2500), at(2500, route_salt("ocr", "2")))
    assert abs(len(few) / USERS - 0.05) < 0.003
    assert abs(len(more) / USERS - 0.25) < 0.006
    assert few < more
    expected = USERS * 0.25 * 0.25
    sigma = math.sqrt(expected * (1 - 0.25 * 0.25))
    assert abs(len(more & others) - expected) < 3 * sigma


@given(st.text(min_size=1, max_size=40), st.integers(0, WHOLE), st.integers(0, WHOLE))
def test_no_user_goes_back_while_the_share_grows(user: str, one: int, other: int) -> None:
    call = Call({"x-user-id": user})
    low, high = sorted((one, other))
    assert side(at(low), call=call) <= side(at(high), call=call)
    assert (side(at(0), call=call), side(at(WHOLE), call=call)) == (7, 8)


def test_requests_without_a_key_are_divided_by_chance() -> None:
    made = [request(at=time) for time in range(20_000)]
    got = sum(at(1000).choose(each, READY, {}) == 8 for each in made)
    assert abs(got - 2000) < 5 * math.sqrt(20_000 * 0.1 * 0.9)


def test_several_versions_have_shares_and_stable_has_the_rest() -> None:
    route = Route(7, shares=((8, 2000), (9, 3000)), sticky=USER)
    ready = {**READY, 9: Version()}
    got = [side(route, ready, call=Call({"x-user-id": str(user)})) for user in range(20_000)]
    assert [round(got.count(version) / len(got), 1) for version in (7, 8, 9)] == [0.5, 0.2, 0.3]
    assert [route.traffic(version) for version in (7, 8, 9, 10)] == [50.0, 20.0, 30.0, 0.0]
    assert side(Route(7, shares=((9, WHOLE),))) == 7, "a version that is not ready gets nothing"
    assert side(Route(5, shares=((6, WHOLE),))) == 8, "nor does a stable one, while others are ready"
    assert side(Route(5, 6, ((6, WHOLE),)), {}) == 5


@pytest.mark.parametrize("shares", [((8, -1),), ((8, 9000), (9, 2000))])
def test_shares_that_can_not_be(shares: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(ValueError, match="together at most 10000"):
        Route(7, 8, shares)


@pytest.mark.parametrize(
    ("wanted", "version"),
    [("8", 8), ("candidate", 8), ("stable", 7), ("champion", 7), ("lost", 99), ("5", 5)],
)
def test_the_override_names_a_version_whether_it_is_ready_or_not(wanted: str, version: int) -> None:
    assert side(at(0), call=Call({"conch-version": wanted})) == version


def test_an_override_that_names_nothing_is_refused_or_does_not_count() -> None:
    call = Call({"conch-version": "nothing"})
    with pytest.raises(InvalidArgumentError, match="version string 'nothing'"):
        side(at(0), call=call)
    assert side(Route(7, 8, override=False), call=call) == 7
    assert side(Route(7), call=Call({"conch-version": "candidate"})) == 7


def test_a_sequence_stays_where_it_is() -> None:
    ready = {7: Version(1), 8: Version("a")}
    assert side(at(WHOLE), ready, sequence=1) == 7
    assert side(at(0), ready, sequence="a") == 8
    matching = Route(7, 8, match=(MatchRule.parse("principal:*"),))
    assert side(matching, ready, sequence=1, call=Call({}, "qa-1")) == 7
    new = request(sequence=1)
    new.sequence_start = True
    assert at(WHOLE).choose(new, ready, {}) == 8


@given(st.integers(1, 2**64 - 1) | st.text(min_size=1))
def test_a_sequence_is_the_key_where_there_is_no_other(sequence: int | str) -> None:
    assert len({side(at(5000), sequence=sequence, at=time) for time in range(8)}) == 1


@pytest.mark.parametrize(
    ("rule", "headers", "principal", "version"),
    [
        ("header:X-Beta=1", {"x-beta": "1"}, "", 8),
        ("header:x-beta=1", {"x-beta": "10"}, "", 7),
        ("header:x-beta=*", {}, "", 7),
        ("principal:qa-*", {}, "qa-lena", 8),
        ("principal:qa-*", {}, "web", 7),
        ("principal:*", {}, "", 7),
    ],
)
def test_match_rules(rule: str, headers: dict[str, str], principal: str, version: int) -> None:
    route = Route(7, 8, match=(MatchRule.parse(rule),))
    assert side(route, call=Call(headers, principal)) == version
    assert side(route, {7: Version()}, call=Call(headers, principal)) == 7


@pytest.mark.parametrize("text", ["", "header:", "header", "cookie:x", "header:a b", "sequence:x"])
def test_attributes_that_do_not_exist(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"'sequence', 'principal' and 'header:NAME'"):
        Attribute.parse(text)
    with pytest.raises(InvalidArgumentError):
        MatchRule.parse(text)


def test_the_first_attribute_that_a_request_has_is_its_key() -> None:
    sticky = tuple(map(Attribute.parse, ("header:X-User-Id", "Principal")))
    route = Route(7, 8, ((8, 5000),), SALT, sticky)
    for user in map(str, range(50)):
        by_header = side(at(5000), call=Call({"x-user-id": user}))
        assert side(route, call=Call({"x-user-id": user}, "web")) == by_header
        assert side(route, call=Call({}, user)) == by_header


def test_a_request_keeps_its_side_while_that_is_ready() -> None:
    made = request(call=Call({"x-user-id": "1"}))
    assert at(WHOLE).choose(made, READY, {}) == 8
    assert at(0).choose(made, READY, {}) == 8
    assert at(WHOLE).choose(made, {7: Version()}, {}) == 7


@given(st.integers(0, WHOLE), st.integers(0, 2**62), st.booleans())
def test_requests_within_a_request_see_its_side(share: int, time: int, keyed: bool) -> None:
    outer = request(call=Call({"x-user-id": str(time)} if keyed else {}), at=time)
    step = request(at=time + 1)
    step.reader = outer
    call = request(around=step, at=time + 2)
    assert call.outermost is step.outermost is outer
    assert len({at(share).choose(each, READY, {}) for each in (outer, step, call)}) == 1


def test_a_request_within_a_request_ignores_an_override_that_is_not_for_it() -> None:
    for wanted, version in (("candidate", 8), ("8", 8), ("99", 7), ("nothing", 7), ("lost", 7)):
        outer = request(call=Call({"conch-version": wanted}))
        assert side(at(0), around=outer) == version
