"""Loads that bring files, and the clients that they are taken from."""

from __future__ import annotations

import base64
import ssl
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from tests.support.certificates import Authority
from tests.support.loading import answer, config_json, files, load, write_number
from tests.support.servers import AnyServer, RawClient, serving, serving_process
from tritonclient.grpc import service_pb2

from conch.access.access_guard import UNGUARDED, AccessGuard, PortRules

EXPLICIT = "--model-control-mode=explicit"

# Fields of a config that choose code on the server's machine, or files that an engine writes to, by the name
# in the refusal.
CHOOSES_CODE: dict[str, dict[str, Any]] = {
    name: {"parameters": {name: {"string_value": "/tmp/of-the-client"}}}
    for name in (
        *("EXECUTION_ENV_PATH", "CONCH_ENV_BROWSER", "CONCH_ALLOW_PICKLE"),
        *("CPU_EXTENSION_PATH", "CACHE_DIR", "CONCH_OV_CACHE_DIR", "CONCH_OV_CPU_EXTENSION_PATH"),
        *("chat_template", "tokenizer", "CONCH_PASS_ENVIRONMENT"),
        *("TF_INIT_OPS_FILE", "session.model_external_initializers_file_folder_path"),
    )
}
CHOOSES_CODE["/dev/shm/evil.so"] = {"model_operations": {"op_library_filename": ["/dev/shm/evil.so"]}}
CHOOSES_CODE["'agent'"] = {"model_repository_agents": {"agents": [{"name": "agent"}]}}
CHOOSES_CODE |= {
    name: {
        "optimization": {
            "execution_accelerators": {
                "gpu_execution_accelerator": [
                    {"name": accelerator, "parameters": {name: "/tmp/of-the-client"}}
                ]
            }
        }
    }
    for accelerator, name in (
        *(("tensorrt", "trt_extra_plugin_lib_paths"), ("tensorrt", "trt_engine_cache_path")),
        *(("tensorrt", "trt_timing_cache_path"), ("tensorrt", "trt_ep_context_file_path")),
        *(("tensorrt", "trt_dump_subgraphs"), ("cuda", "gpu_external_alloc"), ("openvino", "load_config")),
    )
}


def rest_load(server: AnyServer, headers: Mapping[str, str] | None = None, **options: Any) -> tuple[int, str]:
    """Loads model `m` with files over REST; status and text of the answer."""
    parameters = {
        key: value if isinstance(value, str) else base64.b64encode(value).decode()
        for key, value in files(v1=7).items()
    }
    url = f"{'https' if 'verify' in options else 'http'}://{server.http_address}/v2/repository/models/m/load"
    response = httpx.post(url, json={"parameters": parameters}, headers=headers, **options)
    return response.status_code, response.text


def refused(text: str) -> bool:
    return "brings a file ('file:1/model.py')" in text and "--allow-model-upload" in text


@pytest.mark.process
def test_an_address_proves_nothing(tmp_path: Path) -> None:
    # A server that listens on the loopback interface only, called from there, as a proxy without a word of
    # its own does.
    write_number(tmp_path, "m")
    flags = [EXPLICIT, "--grpc-address=127.0.0.1", "--http-address=127.0.0.1"]
    with serving_process(tmp_path, flags=flags) as server, closing(RawClient(server.address)) as client:
        (said,) = [line for line in server.output.splitlines() if line.startswith("open: ")]
        assert "loading models to this machine (gRPC, HTTP)" in said and "with files" not in said
        code, text = load(client, "m", files(v1=7))
        assert code == "PERMISSION_DENIED"
        assert refused(text)
        status, text = rest_load(server)
        assert status == 403
        assert refused(text)
        for name, fields in CHOOSES_CODE.items():
            code, text = load(client, "m", {"config": config_json(**fields)})
            assert code == "PERMISSION_DENIED", name
            assert name in text and "--allow-model-upload" in text
        assert load(client, "m", {"config": config_json()}) == {}  # loads without files are another matter
        assert answer(client, "m") == 1.0


def test_where_loading_is_not_allowed_the_mode_is_said_first(tmp_path: Path) -> None:
    write_number(tmp_path, "m")
    with serving(tmp_path) as server, closing(RawClient(server.address)) as client:
        code, text = load(client, "m", files(v1=7))
        assert code == "UNAVAILABLE"
        assert text.startswith("explicit model load / unload is not allowed if polling is enabled")
        assert rest_load(server)[0] == 503


def test_the_operator_takes_files_from_all_clients(tmp_path: Path) -> None:
    write_number(tmp_path, "m")
    with (
        serving(tmp_path, flags=[EXPLICIT, "--allow-model-upload"]) as server,
        closing(RawClient(server.address)) as client,
    ):
        assert load(client, "m", files(v1=5)) == {}
        assert answer(client, "m") == 5.0
        assert rest_load(server)[0] == 200


def test_files_from_callers_with_a_restricted_key(tmp_path: Path) -> None:
    write_number(tmp_path, "m")
    flags = [
        EXPLICIT,
        "--grpc-restricted-protocol=model-repository:key=secret",
        "--http-restricted-api=model-repository:key=secret",
    ]
    request = service_pb2.RepositoryModelLoadRequest(model_name="m")
    request.parameters["config"].string_param = config_json()
    request.parameters["file:1/model.py"].bytes_param = files(v1=5)["file:1/model.py"]
    with serving(tmp_path, flags=flags) as server, closing(RawClient(server.address)) as client:
        client("RepositoryModelLoad", request, [("triton-grpc-protocol-key", "secret")])
        assert answer(client, "m") == 5.0
        assert rest_load(server, {"key": "secret"})[0] == 200
        assert "This API is restricted" in rest_load(server)[1]


@pytest.mark.slow
def test_files_from_callers_with_a_certificate(tmp_path: Path) -> None:
    write_number(tmp_path / "models", "m")
    authority = Authority(tmp_path / "authority")
    (key, certificate), (own_key, own) = authority.issue("server"), authority.issue("client")
    flags = [EXPLICIT, "--grpc-use-ssl-mutual=true", "--http-use-ssl=true"]
    for port in ("grpc", "http"):
        flags += [f"--{port}-server-key={key}", f"--{port}-server-cert={certificate}"]
        flags += [f"--{port}-root-cert={authority.root}"]
    context = ssl.create_default_context(cafile=str(authority.root))
    context.check_hostname = False
    context.load_cert_chain(own, own_key)
    secure = grpc.ssl_channel_credentials(authority.root.read_bytes(), own_key.read_bytes(), own.read_bytes())
    with (
        serving(tmp_path / "models", flags=flags) as server,
        closing(RawClient(server.address)) as client,
    ):
        client.channel.close()
        client.channel = grpc.secure_channel(
            server.address, secure, [("grpc.ssl_target_name_override", "localhost")]
        )
        assert load(client, "m", files(v1=5)) == {}
        assert rest_load(server, verify=context)[0] == 200


def test_files_over_a_unix_socket(tmp_path: Path) -> None:
    write_number(tmp_path / "models", "m")
    address = f"unix:{tmp_path}/socket"
    with (
        serving(tmp_path / "models", flags=[EXPLICIT, f"--grpc-address={address}"]),
        closing(RawClient(address)) as client,
    ):
        assert load(client, "m", files(v1=5)) == {}


@pytest.mark.parametrize("client", ["ipv4:127.0.0.1:5", "ipv6:[::1]:5", "127.0.0.1:5", "unix-abstract:x", ""])
def test_only_the_permissions_of_a_socket_are_a_proof(client: str) -> None:
    assert not UNGUARDED.may_upload(client, ["host"])
    assert AccessGuard(None, "http", PortRules(any_upload=True)).may_upload(client, ["host"])
    assert UNGUARDED.may_upload("unix:", ["host"])
    for name in ("x-forwarded-for", "forwarded", "via", "x-real-ip"):
        assert not UNGUARDED.may_upload("unix:", ["host", name])


def test_files_come_from_callers_with_the_key_that_loads_need() -> None:
    for category, allowed in (("model-repository", True), ("inference", False)):
        guard = AccessGuard(None, "http", PortRules({category: ("key", "value")}))
        assert guard.may_upload("ipv4:127.0.0.1:5", ["host"]) is allowed
