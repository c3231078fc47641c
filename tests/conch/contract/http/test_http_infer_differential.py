"""The same infer requests to a real Triton and to ours: status and body must be the same."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator

import pytest
from tests.conch.contract.http.test_http_infer import (
    BINARY,
    HEAD,
    REFUSED,
    TAIL,
    A,
    ask,
    both,
    out,
    write_models,
)
from tests.support.peers import NEEDS_TRITON, agrees, triton_serving
from tests.support.servers import free_port, serving

pytestmark = [*NEEDS_TRITON, pytest.mark.slow]

# Triton has changed these texts since its version 2.51, which can't be shown the third without ending.
NEWER = (
    "Failed to parse 'data' field",
    "already exists in request",
    "invalid shape for",
    "byte_size (",
    "limit",
)
LENGTH = str(len(BINARY))
REQUESTS: list[tuple[bytes, dict[str, str], str]] = [
    *((body.encode(), {}, "two") for body, _, text in REFUSED if not any(new in text for new in NEWER)),
    *(
        (body.encode(), {}, "two")
        for body in (
            both(),
            both(more=',"id":"x y"'),
            both(more=',"id":"1","id":"2"'),
            both(more=',"outputs":[]'),
            both(more=',"parameters":{"x":1.5,"y":18446744073709551615}'),
            both(a=A.replace("[1,2]", "[[1],[[2]],[]]")),
            both(a=A.replace("[1,2]", "[NaN,-Inf]")),
            both(a=A.replace("[1,2]", "[1e300,-0]")),
            both(b='{"name":"B","datatype":"INT32","shape":[2],"data":[2147483648,1099511627781]}'),
            both(b='{"name":"B","datatype":"INT32","shape":[2],"data":[9223372036854775808,1]}'),
            out("OB", classification=1),
            out("OB", classification=2, binary_data=True),
            out("OB", classification=0),
            out("OA", binary_data=False, shared_memory_region="x"),  # as tritonclient has it
            out("OA", binary_data=1, shared_memory_region="x"),
            out("OA", binary_data="x"),
            out("OA", shared_memory_region=None),
            out("OA", shared_memory_region=7),
            out("OA", classification=0, shared_memory_region="x"),
            out("OA", shared_memory_region="x", shared_memory_byte_size=-1),
            "[]",
            "",
            '{"a":"\\ud800"}',
            '{"a":01}',
            "{} x",
        )
    ),
    (BINARY.encode() + TAIL, {HEAD: LENGTH}, "two"),
    (BINARY.encode() + TAIL[:-3], {HEAD: LENGTH}, "two"),
    (BINARY.encode() + TAIL + b"x", {HEAD: LENGTH}, "two"),
    (BINARY.encode() + TAIL, {HEAD: "-1"}, "two"),
    (BINARY.encode() + TAIL, {HEAD: "99999"}, "two"),
    (BINARY.encode() + TAIL, {HEAD: "20"}, "two"),
    (TAIL, {HEAD: "0"}, "batched"),
    (b"", {HEAD: "0"}, "batched"),
    (TAIL, {HEAD: "0"}, "wild"),
    (b"hello", {HEAD: "0"}, "one_string"),
    (gzip.compress(both().encode(), mtime=0), {"Content-Encoding": "deflate"}, "two"),
    (zlib.compress(both().encode()), {"Content-Encoding": "gzip"}, "two"),
    (both().encode(), {"Content-Encoding": "br"}, "two"),
    (b"{bad", {}, "zz"),
    (b"{bad", {}, "two/versions/9"),
    (b"{bad", {}, "two/versions/99999999999999999999"),
]


@pytest.fixture(scope="module")
def addresses(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Addresses of Triton's REST port and of ours."""
    repository = tmp_path_factory.mktemp("models")
    write_models(repository)
    port = free_port()
    with (
        serving(repository) as server,
        triton_serving(repository, "--allow-http=true", f"--http-port={port}"),
    ):
        yield f"127.0.0.1:{port}", server.http_address


@pytest.mark.parametrize("number", range(len(REQUESTS)))
def test_the_same_answer(addresses: tuple[str, str], number: int) -> None:
    body, headers, path = REQUESTS[number]
    theirs, ours = (ask(address, body, headers, path) for address in addresses)
    if theirs[0] == 200:
        assert (ours[0], ours[2]) == (theirs[0], theirs[2]), body
        assert ours[1].get(HEAD.lower()) == theirs[1].get(HEAD.lower())
        assert ours[1]["content-type"] == theirs[1]["content-type"]
    else:
        errors = [(status, json.loads(text)["error"]) for status, _, text in (ours, theirs)]
        assert agrees(*errors), body
