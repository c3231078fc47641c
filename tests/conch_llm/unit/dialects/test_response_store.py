"""The store of responses: bounded, and each caller's own."""

from __future__ import annotations

from conch_llm.frontend.dialects.response_store import ResponseStore, StoredResponse


def stored(owner: str = "", size: int = 0) -> StoredResponse:
    return StoredResponse(owner, b"[]", b"[]", b"{" + b" " * size + b"}")


def test_what_is_longest_not_used_goes_first() -> None:
    store = ResponseStore(2 * stored().size)
    for name in ("a", "b"):
        assert store.put(name, stored())
    assert store.get("a", "") is not None
    assert store.put("c", stored())
    assert [store.get(name, "") is not None for name in "abc"] == [True, False, True]
    assert store.remove("a", "") and not store.remove("a", "")
    assert store.put("d", stored())
    assert [store.get(name, "") is not None for name in "cd"] == [True, True], "what is removed leaves room"


def test_a_response_above_the_limit_is_not_kept_and_takes_no_others_place() -> None:
    store = ResponseStore(stored().size + 8)
    assert store.put("a", stored())
    assert not store.put("b", stored(size=9))
    assert store.get("a", "") is not None and store.get("b", "") is None


def test_responses_are_their_owners() -> None:
    store = ResponseStore(1 << 16)
    store.put("a", stored("ann"))
    assert store.get("a", "bob") is None and not store.remove("a", "bob")
    assert store.get("a", "ann") is not None
