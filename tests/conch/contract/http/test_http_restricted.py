"""Restricted APIs: routes that need a secret in a header."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import httpx
import pytest
import tritonclient.http as triton
from tests.support.servers import EXAMPLES, serving, started
from tritonclient.utils import InferenceServerException

PATHS = {
    "health": ["/v2/health/live", "/v2/health/ready", "/v2/models/simple/ready"],
    "metadata": ["/v2", "/v2/models/simple"],
    "inference": [
        "/v2/models/simple/infer",
        "/v2/models/simple/generate",
        "/v2/models/simple/generate_stream",
    ],
    "shared-memory": ["/v2/systemsharedmemory/status", "/v2/cudasharedmemory/unregister"],
    "model-config": ["/v2/models/simple/config"],
    "model-repository": ["/v2/repository/index", "/v2/repository/models/simple/load"],
    "statistics": ["/v2/models/stats", "/v2/models/simple/stats"],
    "trace": ["/v2/trace/setting", "/v2/models/simple/trace/setting"],
    "logging": ["/v2/logging"],
}


def test_each_category_has_its_secret() -> None:
    restricted = ["health", "metadata", "inference", "shared-memory", "model-repository", "trace"]
    flags = [
        f"--http-restricted-api={','.join(restricted[:3])}:Key=secret",
        f"--http-restricted-api={','.join(restricted[3:])}:other=o=ö",
    ]
    with (
        serving(EXAMPLES, flags=flags) as server,
        httpx.Client(base_url=f"http://{server.http_address}") as client,
    ):
        for category, paths in PATHS.items():
            first = category in restricted[:3]
            header = {b"key": b"secret"} if first else {b"other": "o=ö".encode()}
            for path in paths:
                for method in ("GET", "POST", "DELETE"):
                    answer = client.request(method, path)
                    if category not in restricted:
                        assert answer.status_code in (200, 405), (method, path)
                        continue
                    expected = f"This API is restricted, expecting header '{'key' if first else 'other'}'"
                    assert (answer.status_code, answer.json()) == (403, {"error": expected})
                    wrong = client.request(method, path, headers=dict.fromkeys(header, b"wrong"))
                    assert wrong.status_code == 403
                    assert client.request(method, path, headers=header).status_code != 403
        with closing(triton.InferenceServerClient(server.http_address)) as triton_client:
            assert not triton_client.is_server_live()
            assert triton_client.is_server_live(headers={"key": "secret"})
            with pytest.raises(
                InferenceServerException, match="This API is restricted, expecting header 'other'"
            ):
                triton_client.get_model_repository_index()


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--http-restricted-api=nothing:k=v"], "unknown restricted api 'nothing'"),
        (["--http-restricted-api=health:k=v", "--http-restricted-api=trace,health:k=v"],
         "restricted api 'health' can not be specified in multiple config groups"),
        (["--http-restricted-api=health:k"], "is not of the form"),
    ],
)  # fmt: skip
@pytest.mark.process
def test_a_malformed_flag_is_an_error(tmp_path: Path, flags: list[str], text: str) -> None:
    with started(f"--model-repository={tmp_path}", *flags) as server:
        assert server.wait() != 0
        assert text in server.errors
