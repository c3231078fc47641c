"""Infer over REST, with tritonclient, curl and sockets."""

from __future__ import annotations

import asyncio
import gzip
import json
import shutil
import socket
import subprocess
import threading
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as http
import tritonclient.http.aio as http_aio
from tests.support.contract_server import CASTER
from tests.support.servers import (
    WAIT_S,
    AnyServer,
    eventually,
    serving,
    serving_process,
    write_model,
    write_probe,
)
from tritonclient.utils import InferenceServerException, triton_to_np_dtype

Reply = tuple[int, dict[str, str], bytes]

TWO = """
    backend: "python"
    input { name: "A" data_type: TYPE_FP32 dims: [ 2 ] }
    input { name: "B" data_type: TYPE_INT32 dims: [ 2 ] }
    output { name: "OA" data_type: TYPE_FP32 dims: [ 2 ] }
    output { name: "OB" data_type: TYPE_INT32 dims: [ 2 ] }
"""
ONE_STRING = """
    backend: "python"
    input { name: "S" data_type: TYPE_STRING dims: [ 1 ] }
    output { name: "OS" data_type: TYPE_STRING dims: [ 1 ] }
"""
A = '{"name":"A","datatype":"FP32","shape":[2],"data":[1,2]}'
B = '{"name":"B","datatype":"INT32","shape":[2],"data":[3,4]}'
ANSWER = (
    b'{"model_name":"two","model_version":"1","outputs":[{"name":"OA","datatype":"FP32","shape":[2],'
    b'"data":[1.0,2.0]},{"name":"OB","datatype":"INT32","shape":[2],"data":[3,4]}]}'
)
HEAD = "Inference-Header-Content-Length"


def write_models(repository: Path) -> None:
    """Models that the tables of requests are for."""
    write_model(repository, "two", TWO, {"model.py": CASTER})
    write_model(repository, "one_string", ONE_STRING, {"model.py": CASTER})
    write_model(repository, "strings", ONE_STRING.replace("[ 1 ]", "[ -1 ]"), {"model.py": CASTER})
    for name, dims in (("batched", "-1"), ("wild", "-1, -1")):
        config = (
            f'backend: "python" max_batch_size: 8\n'
            f'input {{ name: "IN" data_type: TYPE_FP32 dims: [ {dims} ] }}\n'
            f'output {{ name: "OIN" data_type: TYPE_FP32 dims: [ {dims} ] }}'
        )
        write_model(repository, name, config, {"model.py": CASTER})


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AnyServer]:
    """A server with small models that answer with their inputs."""
    repository = tmp_path_factory.mktemp("models")
    write_models(repository)
    write_probe(repository)
    flags = ["--http-max-input-size=65536", "--http-header-forward-pattern=^x-.*|^timeout$"]
    with serving(repository, flags=flags) as server:
        yield server


def ask(
    address: str, body: bytes | str | None, headers: dict[str, str] | None = None, path: str = "two"
) -> Reply:
    """Sends one request to a model's infer route, or with a method to another path."""
    host, _, port = address.rpartition(":")
    method, _, target = path.rpartition(" ")
    with closing(HTTPConnection(host, int(port), timeout=WAIT_S)) as connection:
        target = target if target.startswith("/") else f"/v2/models/{target}/infer"
        data = body.encode() if isinstance(body, str) else body
        connection.request(method or "POST", target, data, headers or {})
        response = connection.getresponse()
        content = response.read()
        return response.status, {name.lower(): value for name, value in response.getheaders()}, content


def both(a: str = A, b: str = B, more: str = "") -> str:
    return f'{{"inputs":[{a},{b}]{more}}}'


def inputs(a: dict[str, Any]) -> str:
    """A request whose first input is changed; None takes a member away."""
    changed = {**json.loads(A), **a}
    return both(json.dumps({key: value for key, value in changed.items() if value is not None}))


def out(name: str, **parameters: Any) -> str:
    return both(more=f',"outputs":[{{"name":"{name}","parameters":{json.dumps(parameters)}}}]')


def parameter(text: str) -> str:
    return both(more=f',"parameters":{text}')


SOURCES = (
    "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', "
    "'shared_memory_region' in 'parameters'. But"
)
NOT = "attempt to access JSON non-{} as {}".format
REFUSED: list[tuple[str, int, str]] = [
    ("{}", 500, "Unable to parse 'inputs': attempt to access non-existing object member 'inputs'"),
    ("5", 500, "Unable to parse 'inputs': attempt to access non-existing object member 'inputs'"),
    ('{"inputs":{}}', 500, f"Unable to parse 'inputs': {NOT('array', 'array')}"),
    ('{"inputs":[', 500, "failed to parse the request JSON buffer: Invalid value. at 11"),
    (both(more=',"id":7'), 500, f"Unable to parse 'id': {NOT('string', 'string')}"),
    ('{"inputs":[5]}', 400, f"{SOURCES} no field is set"),
    (inputs({"data": None}), 400, f"{SOURCES} no field is set, for input 'A'"),
    (inputs({"parameters": {"binary_data_size": 8}}), 400, f"{SOURCES} set 'data' 'binary_data_size'"),
    (
        inputs({"name": None}),
        500,
        "Unable to parse 'name': attempt to access non-existing object member 'name'",
    ),
    (inputs({"datatype": 5}), 500, f"Unable to parse 'datatype': {NOT('string', 'string')}"),
    (inputs({"shape": 5}), 500, f"Unable to parse 'shape': {NOT('array', 'array')}, for input 'A'"),
    (inputs({"shape": [-2]}), 500, f"Unable to parse 'shape': {NOT('unsigned-integer', 'unsigned-integer')}"),
    (
        inputs({"shape": [2.0]}),
        500,
        f"Unable to parse 'shape': {NOT('unsigned-integer', 'unsigned-integer')}",
    ),
    (inputs({"data": 5}), 500, f"Unable to parse 'data': {NOT('array', 'array')}, for input 'A'"),
    (
        inputs({"data": ["a", 2]}),
        500,
        f"Unable to parse 'data': {NOT('number', 'double')}: input 'A' expects FP32, got a string",
    ),
    (
        inputs({"data": [1, 2, 3]}),
        500,
        "Unable to parse 'data': Shape does not match true shape of 'data' field: input 'A' expects 2 "
        "elements, got more",
    ),
    (
        inputs({"data": [1]}),
        500,
        "Failed to parse 'data' field: shape does not match true shape: input 'A' expects 2 elements, got 1",
    ),
    (
        inputs({"shape": [2**40, 2**40]}),
        400,
        "invalid shape for input 'A': shape [1099511627776,1099511627776] causes total element count to "
        "exceed maximum size of 9223372036854775807",
    ),
    (
        inputs({"shape": [65536]}),
        400,
        "JSON input 'A' has a byte_size (262144 bytes) that exceeds the maximum allowed value of 65536 "
        "bytes. Use --http-max-input-size to increase the limit.",
    ),
    (
        inputs({"datatype": "FP16"}),
        400,
        "receiving FP16 data via JSON is not supported. Please use the binary data format for input A",
    ),
    (both(more=f',"x":"{"y" * 65536}"'), 400, "exceeds the maximum allowed input size of 65536 bytes"),
    (f'{{"inputs":[{A},{B},{A}]}}', 400, "input 'A' already exists in request"),
    (both(a=A.replace('"A"', '"Z"')), 400, "unexpected inference input 'Z' for model 'two'"),
    (out("Z"), 400, "unexpected inference output 'Z' for model 'two'"),
    (both(more=',"outputs":{}'), 500, f"Unable to parse 'outputs': {NOT('array', 'array')}"),
    (both(more=',"outputs":[{"name":"OA"},{"name":"OA"}]'), 400, "output 'OA' already exists in request"),
    (
        out("OA", classification="x"),
        500,
        f"Unable to set 'classification': {NOT('unsigned-integer', 'unsigned-integer')}",
    ),
    (out("OA", binary_data=1), 500, f"Unable to parse 'binary_data': {NOT('boolean', 'boolean')}"),
    (
        out("OA", classification=1, shared_memory_region="x"),
        400,
        "Output can't set both 'shared_memory_region' and 'classification'",
    ),
    (
        out("OA", binary_data=True, shared_memory_region="x"),
        400,
        "Output can't set both 'shared_memory_region' and 'binary_data'",
    ),
    (
        out("OA", shared_memory_region="x", shared_memory_byte_size=8),
        404,
        "Unable to find shared memory region: 'x'",
    ),
    (
        inputs({"data": None, "parameters": {"shared_memory_region": "x", "shared_memory_byte_size": 8}}),
        404,
        "Unable to find shared memory region: 'x'",
    ),
    (parameter("5"), 500, "failed to get request params.: attempt to get members for non-object"),
    (parameter('{"sequence_id":-1}'), 500, f"Unable to parse 'sequence_id': {NOT('string', 'string')}"),
    (
        parameter('{"priority":-1}'),
        500,
        f"Unable to parse 'priority': {NOT('unsigned-integer', 'unsigned-integer')}",
    ),
    (
        parameter('{"triton_x":1}'),
        400,
        "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified.",
    ),
    (
        parameter('{"x":[1]}'),
        400,
        "parameter 'x' has invalid type. It should be either 'int', 'bool', or 'string'.",
    ),
]


@pytest.mark.parametrize(("body", "status", "text"), REFUSED)
def test_refused(own: AnyServer, body: str, status: int, text: str) -> None:
    got, headers, content = ask(own.http_address, body)
    assert headers["content-type"] == "application/json"
    error = json.loads(content)
    assert list(error) == ["error"]
    assert text in error["error"] and got == status, error


def test_json_answers_are_tritons_to_the_byte(own: AnyServer) -> None:
    status, headers, content = ask(own.http_address, both())
    assert (status, headers["content-type"], content) == (200, "application/json", ANSWER)
    _, _, content = ask(own.http_address, both(more=',"id":"x y","parameters":{"a":1,"b":"s","c":true}'))
    assert content == b'{"id":"x y",' + ANSWER[1:]
    nan = both(a=A.replace("[1,2]", "[NaN,-Infinity]"))
    assert b'"data":[NaN,-Infinity]' in ask(own.http_address, nan)[2]


def test_which_outputs_are_binary(own: AnyServer) -> None:
    raw_a, raw_b = np.array([1, 2], np.float32).tobytes(), np.array([3, 4], np.int32).tobytes()

    def tails(body: str) -> bytes:
        status, headers, content = ask(own.http_address, body)
        assert status == 200
        if HEAD.lower() not in headers:
            assert headers["content-type"] == "application/json"
            return b""
        assert headers["content-type"] == "application/octet-stream"
        length = int(headers[HEAD.lower()])
        json.loads(content[:length])
        return content[length:]

    asked = ',"parameters":{"binary_data_output":true}'
    assert tails(both(more=asked)) == raw_a + raw_b
    assert tails(both(more=asked + ',"outputs":[]')) == raw_a + raw_b
    assert tails(both(more=asked + ',"outputs":[{"name":"OA"}]')) == b""
    assert tails(out("OB", binary_data=True)) == raw_b
    assert tails(out("OB", binary_data=False)) == b""
    assert tails(out("OB", binary_data=True, classification=1)) == b"\x03\x00\x00\x004:1"


def test_a_binary_output_of_no_bytes_is_plain_json(own: AnyServer) -> None:
    status, headers, content = ask(own.http_address, b"", {HEAD: "0"}, "batched")
    assert (status, headers["content-type"]) == (200, "application/json") and HEAD.lower() not in headers
    assert json.loads(content)["outputs"][0]["parameters"] == {"binary_data_size": 0}


@pytest.mark.parametrize(
    ("model", "body", "answer"),
    [
        ("batched", np.array([1, 2], np.float32).tobytes(), np.array([1, 2], np.float32).tobytes()),
        ("one_string", b"hello", b"\x05\x00\x00\x00hello"),
        ("one_string", b"", b"\x00\x00\x00\x00"),
        ("strings", b"hello", "For BYTE datatype raw input 'S', the model must have input shape [1]"),
        (
            "batched",
            b"12345",
            "[request id: <id_unknown>] input byte size mismatch for input 'IN' for model 'batched'. "
            "Expected 4, got 5",
        ),
        ("wild", b"1234", "can not be deduced because there are more than one variable-sized dimension"),
        (
            "two",
            b"1234",
            "Raw request must only have 1 input (found 1) to be deduced but got 2 inputs in 'two'",
        ),
        ("batched", bytes(65540), "Raw input has a byte_size (65540 bytes) that exceeds the maximum allowed"),
    ],
)
def test_raw_requests(own: AnyServer, model: str, body: bytes, answer: bytes | str) -> None:
    status, headers, content = ask(own.http_address, body, {HEAD: "0"}, model)
    if isinstance(answer, str):
        assert status == 400 and answer in json.loads(content)["error"]
    else:
        assert status == 200 and content[int(headers[HEAD.lower()]) :] == answer


BINARY = json.dumps(
    {
        "inputs": [
            {"name": name, "datatype": datatype, "shape": [2], "parameters": {"binary_data_size": 8}}
            for name, datatype in (("A", "FP32"), ("B", "INT32"))
        ]
    }
)
TAIL = np.array([1, 2], np.float32).tobytes() + np.array([3, 4], np.int32).tobytes()


@pytest.mark.parametrize(
    ("tail", "head", "status", "text"),
    [
        (TAIL[:-1], None, 400, "unexpected size for input 'B', expecting 1 additional bytes for model 'two'"),
        (TAIL + b"x", None, 400, "unexpected additional input data for model 'two'"),
        (TAIL, "-1", 400, "inference header size should be in range (0, "),
        (TAIL, "99999", 400, "inference header size should be in range (0, "),
        (TAIL, "x", 400, "Unable to parse Inference-Header-Content-Length, got: x"),
        (TAIL, "1099511627776", 400, "value is out of range [ -2147483648, 2147483647 ], got: 1099511627776"),
        (TAIL, "20", 500, "failed to parse the request JSON buffer: Invalid value. at 20"),
    ],
)
def test_binary_tensors_that_do_not_add_up(
    own: AnyServer, tail: bytes, head: str | None, status: int, text: str
) -> None:
    body, headers = BINARY.encode() + tail, {HEAD: head or str(len(BINARY))}
    assert ask(own.http_address, BINARY.encode() + TAIL, {HEAD: str(len(BINARY))})[2] == ANSWER
    got, _, content = ask(own.http_address, body, headers)
    assert got == status and text in json.loads(content)["error"]


def test_a_binary_tensor_without_the_header(own: AnyServer) -> None:
    status, _, content = ask(own.http_address, BINARY)
    assert status == 400
    assert json.loads(content)["error"] == (
        "must specify valid 'Infer-Header-Content-Length' in request header and 'binary_data_size' when "
        "passing inputs in binary data format"
    )


@pytest.mark.parametrize(
    ("path", "status", "text"),
    [
        ("GET /v2/models/two/infer", 405, "Method Not Allowed"),
        ("zz", 404, "Request for unknown model: 'zz' is not found"),
        ("two/versions/9", 404, "Request for unknown model: 'two' version 9 is not found"),
        ("two/versions/x", 404, "Not Found"),
        ("/v2/models/two/infer/", 404, "Not Found"),
        ("t%77o%2F", 404, "Request for unknown model: 'two/' is not found"),
        ("GET /v2/models/zz/infer", 405, "Method Not Allowed"),
    ],
)
def test_paths(own: AnyServer, path: str, status: int, text: str) -> None:
    got, _, content = ask(own.http_address, "{bad", path=path)
    assert (got, json.loads(content)) == (status, {"error": text})


def test_paths_that_are_there(own: AnyServer) -> None:
    for path in ("two/versions/1", "/v2/models/two/infer?x=1"):
        assert ask(own.http_address, both(), path=path)[2] == ANSWER


@pytest.mark.parametrize(
    ("encoding", "data"),
    [
        ("gzip", gzip.compress(both().encode(), mtime=0)),
        ("deflate", zlib.compress(both().encode())),
        ("deflate", gzip.compress(both().encode(), mtime=0)),
        ("identity", both().encode()),
    ],
)
def test_compressed_requests(own: AnyServer, encoding: str, data: bytes) -> None:
    assert ask(own.http_address, data, {"Content-Encoding": encoding})[2] == ANSWER


def test_compressed_requests_that_are_refused(own: AnyServer) -> None:
    status, headers, content = ask(own.http_address, both(), {"Content-Encoding": "br"})
    assert (status, headers["accept-encoding"]) == (501, "gzip, deflate")
    assert json.loads(content) == {"error": "Unsupported compression type"}
    for data, text in (
        (b"", "nothing to be decompressed"),
        (gzip.compress(bytes(70000)), "Decompressed data size exceeds the maximum allowed value of 65536"),
        (both().encode(), "the compressed request body is damaged"),
    ):
        status, _, content = ask(own.http_address, data, {"Content-Encoding": "gzip"})
        assert status == 400 and text in json.loads(content)["error"]


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
@pytest.mark.parametrize("count", [2, 10000])
def test_compressed_responses(own: AnyServer, encoding: str, count: int) -> None:
    values = np.arange(count, dtype=np.float32)
    status, headers, content = ask(
        own.http_address, values.tobytes(), {HEAD: "0", "Accept-Encoding": f"br, {encoding}"}, "batched"
    )
    assert (status, headers["content-encoding"]) == (200, encoding)
    whole = zlib.decompress(content, zlib.MAX_WBITS | 32)
    assert whole[int(headers[HEAD.lower()]) :] == values.tobytes()


def test_forwarded_headers(own: AnyServer) -> None:
    body = '{"inputs":[{"name":"IN","datatype":"FP32","shape":[1,1],"data":[0]}],"parameters":{"own":1}}'
    _, _, content = ask(own.http_address, body, {"X-Tenant": "blue", "Y": "no"}, "probe")
    seen = json.loads(json.loads(content)["outputs"][1]["data"][0])
    assert seen["parameters"] == {"own": 1, "X-Tenant": "blue"}
    status, _, content = ask(own.http_address, body, {"timeout": "1"}, "probe")
    assert status == 400
    assert json.loads(content)["error"] == (
        "Header 'timeout' is reserved for Triton usage and cannot be forwarded."
    )


def test_tritonclient(server: AnyServer) -> None:
    with closing(http.InferenceServerClient(server.http_address)) as client:
        for binary in (True, False):
            numbers = np.arange(16, dtype=np.int32).reshape(1, 16)
            given = [http.InferInput(name, [1, 16], "INT32") for name in ("INPUT0", "INPUT1")]
            for each in given:
                each.set_data_from_numpy(numbers, binary_data=binary)
            wanted = [http.InferRequestedOutput("OUTPUT0", binary_data=binary)]
            for algorithm in (None, "gzip", "deflate"):
                result = client.infer(
                    "simple",
                    given,
                    outputs=wanted,
                    request_id="möwe",
                    request_compression_algorithm=algorithm,
                    response_compression_algorithm=algorithm,
                )
                assert result.as_numpy("OUTPUT0").tolist() == (numbers * 2).tolist()
                assert result.get_response()["id"] == "möwe"
            assert client.async_infer("simple", given).get_result().as_numpy("OUTPUT1").tolist() == [[0] * 16]
        with pytest.raises(InferenceServerException, match="Request for unknown model: 'zz' is not found"):
            client.infer("zz", given)


CASTS: dict[str, list[Any]] = {
    "BOOL": [True, False],
    "INT8": [-1, 2],
    "INT16": [-300, 2],
    "INT32": [-(2**31), 2],
    "INT64": [-(2**63), 2],
    "UINT8": [255, 2],
    "UINT16": [65535, 2],
    "UINT32": [2**32 - 1, 2],
    "UINT64": [2**64 - 1, 2],
    "FP16": [0.5, 2],
    "FP32": [0.1, 2],
    "FP64": [0.1, 1e300],
    "BYTES": [b"a\0b", "é".encode()],
}


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("datatype", CASTS)
def test_every_datatype(server: AnyServer, datatype: str, binary: bool) -> None:
    name = "STRING" if datatype == "BYTES" else datatype
    array = np.array(CASTS[datatype], triton_to_np_dtype(datatype))
    tensor = http.InferInput(name, [2], datatype)
    wanted = [http.InferRequestedOutput(f"O{name}", binary_data=binary)]
    with closing(http.InferenceServerClient(server.http_address)) as client:
        if datatype == "FP16" and not binary:
            tensor.set_data_from_numpy(array)
            with pytest.raises(InferenceServerException, match="sending FP16 data via JSON is not supported"):
                client.infer("caster", [tensor], outputs=wanted)
            return
        tensor.set_data_from_numpy(array, binary_data=binary)
        result = client.infer("caster", [tensor], outputs=wanted).as_numpy(f"O{name}")
    given_back = [each.encode() if isinstance(each, str) else each for each in result.tolist()]
    assert given_back == array.tolist()


def test_decoupled_models(server: AnyServer) -> None:
    """As over gRPC: answered where there is one response, else refused with Triton's text."""
    with closing(http.InferenceServerClient(server.http_address)) as client:
        for count in (0, 1, 2):
            tensor = http.InferInput("IN", [count], "INT32")
            tensor.set_data_from_numpy(np.arange(count, dtype=np.int32))
            if count == 1:
                assert client.infer("repeater", [tensor]).as_numpy("OUT").tolist() == [0]
                continue
            with pytest.raises(InferenceServerException) as caught:
                client.infer("repeater", [tensor])
            assert "HTTP end point doesn't support models with decoupled transaction policy" in str(
                caught.value
            )
            assert caught.value.status() == "501"


def test_tritonclient_aio(server: AnyServer) -> None:
    async def run() -> list[Any]:
        async with http_aio.InferenceServerClient(server.http_address) as client:
            given = [http_aio.InferInput(name, [1, 16], "INT32") for name in ("INPUT0", "INPUT1")]
            for each in given:
                each.set_data_from_numpy(np.ones((1, 16), np.int32))
            results = await asyncio.gather(*(client.infer("simple", given) for _ in range(50)))
            return [result.as_numpy("OUTPUT0").sum() for result in results]

    assert asyncio.run(run()) == [32] * 50


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl")
@pytest.mark.process
def test_curl(own: AnyServer, tmp_path: Path) -> None:
    url = f"http://{own.http_address}/v2/models/two/infer"

    def curl(*arguments: str) -> bytes:
        command = ["curl", "-sS", "--max-time", str(WAIT_S), url, *arguments]
        return subprocess.run(command, check=True, capture_output=True).stdout

    assert curl("-d", both()) == ANSWER
    body = tmp_path / "body"
    body.write_bytes(gzip.compress(both().encode()))
    send = ["-H", "Content-Encoding: gzip", "--data-binary", f"@{body}", "--compressed"]
    assert curl(*send) == ANSWER
    assert curl("-H", "Expect: 100-continue", "-H", "Transfer-Encoding: chunked", "-d", both()) == ANSWER


def connected(server: AnyServer) -> socket.socket:
    host, _, port = server.http_address.rpartition(":")
    return socket.create_connection((host, int(port)), WAIT_S)


def message(body: bytes, more: bytes = b"", path: bytes = b"two") -> bytes:
    return (
        b"POST /v2/models/%b/infer HTTP/1.1\r\nHost: x\r\n%bContent-Length: %d\r\n\r\n"
        % (path, more, len(body))
    ) + body


def read_until(client: socket.socket, enough: Any) -> bytes:
    data = b""
    while not enough(data):
        piece = client.recv(1 << 16)
        if not piece:
            break
        data += piece
    return data


def test_pipelined_requests_are_answered_in_order(own: AnyServer) -> None:
    requests = [message(both(more=f',"id":"{number}"').encode()) for number in range(20)]
    requests.insert(7, b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n")
    with connected(own) as client:
        client.sendall(b"".join(requests))
        data = read_until(client, lambda data: data.count(b'"id"') == 20 and data.endswith(b"}"))
    found = [int(part.split(b'"')[1]) for part in data.split(b'"id":')[1:]]
    assert found == list(range(20)) and data.count(b"HTTP/1.1 200 OK") == 21


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_bodies_in_pieces(own: AnyServer, size: int) -> None:
    body = both().encode()
    pieces = [body[start : start + size] for start in range(0, len(body), size)]
    chunked = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
    head = b"POST /v2/models/two/infer HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    with connected(own) as client:
        for _ in range(2):
            client.sendall(head)
            for start in range(0, len(chunked), 100):
                client.sendall(chunked[start : start + 100])
            assert read_until(client, lambda data: data.endswith(b"]}")).endswith(ANSWER)


def test_too_many_chunks(own: AnyServer) -> None:
    # With tensors behind the JSON, for which the limit of bytes does not hold.
    head = (
        b"POST /v2/models/two/infer HTTP/1.1\r\nHost: x\r\nInference-Header-Content-Length: 2\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n"
    )
    with connected(own) as client:
        client.sendall(head + b"1\r\n \r\n" * 65538)
        data = read_until(client, lambda data: False)
    assert data.startswith(b"HTTP/1.1 400")
    assert b"Chunked request body exceeds maximum of 65536 non-empty chunks." in data
    assert b"connection: close" in data


def test_old_and_closing_connections(own: AnyServer) -> None:
    for more, version in ((b"Connection: close\r\n", b"1.1"), (b"", b"1.0")):
        with connected(own) as client:
            client.sendall(message(both().encode(), more).replace(b"HTTP/1.1", b"HTTP/" + version))
            data = read_until(client, lambda data: False)
            assert data.endswith(ANSWER) and b"connection: close" in data.lower()


def test_garbage_harms_nobody(own: AnyServer) -> None:
    for garbage in (
        b"\x00\x01\x02\r\n\r\n",
        b"POST /v2/models/\xff/infer HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST /v2/models/two/infer HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"X: " + b"y" * (2 << 20),
    ):
        with connected(own) as client:
            try:
                client.sendall(garbage)
                assert read_until(client, lambda data: False).startswith(b"HTTP/1.1 400")
            except ConnectionError:
                pass  # closed before all of it was read
    assert ask(own.http_address, both())[2] == ANSWER


def test_a_client_that_goes_away_cancels(own: AnyServer, tmp_path: Path) -> None:
    started, cancelled = tmp_path / "started", tmp_path / "cancelled"
    body = {
        "inputs": [{"name": "IN", "datatype": "FP32", "shape": [1, 1], "data": [0]}],
        "parameters": {"started": str(started), "until_cancelled": str(cancelled)},
    }
    for before in (b"", message(both().encode())):  # behind another request it goes another way
        with connected(own) as client:
            client.sendall(before + message(json.dumps(body).encode(), path=b"probe"))
            eventually(started.exists, "the model runs")
        eventually(cancelled.exists, "the model learns of it")
        started.unlink()
        cancelled.unlink()


def test_idle_and_half_sent_connections_harm_nobody(own: AnyServer) -> None:
    with ExitStack() as stack:
        for number in range(300):
            client = stack.enter_context(connected(own))
            client.sendall(message(both().encode())[: number % 250])
        assert ask(own.http_address, both())[2] == ANSWER


@pytest.mark.process
def test_the_loop_goes_on_while_a_large_body_is_read(tmp_path: Path) -> None:
    """The number of probes answered meanwhile depends on the machine; that some are does not."""
    write_models(tmp_path)
    body = f'{{"inputs":[{{"name":"IN","datatype":"FP32","shape":[1,4000000],"data":[{"1.5," * 3999999}2]}}],'
    body += '"outputs":[{"name":"OIN","parameters":{"binary_data":true}}]}'
    with serving_process(tmp_path) as server:
        answers: list[Reply] = []
        sender = threading.Thread(
            target=lambda: answers.append(ask(server.http_address, body, path="batched"))
        )
        sender.start()
        probes = 0
        while not answers:
            assert ask(server.http_address, None, path="GET /v2/health/live")[0] == 200
            probes += 1
        sender.join()
        status, headers, content = answers[0]
        assert status == 200 and len(content) == int(headers[HEAD.lower()]) + 16_000_000
        assert probes > 3
