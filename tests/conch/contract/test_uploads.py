"""Loads that bring files, and from where they are taken."""

from __future__ import annotations

import base64
import socket
import ssl
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from tests.support.cases import outcome
from tests.support.certificates import Authority
from tests.support.loading import answer, config_json, files, load, write_number
from tests.support.servers import AnyServer, RawClient, serving, serving_process
from tritonclient.grpc import service_pb2

from conch.access.access_guard import UNGUARDED, AccessGuard, PortRules
from conch.frontends.access_policy import is_local_peer, is_loopback

EXPLICIT = "--model-control-mode=explicit"

# Fields of a config that choose code on the server's machine, or files that an engine writes to, by the name
# in the refusal.
CHOOSES_CODE: dict[str, dict[str, Any]] = {
    name: {"parameters": {name: {"string_value": "/tmp/of-the-client"}}}
    for name in (
        *("EXECUTION_ENV_PATH", "CONCH_ENV_BROWSER", "CONCH_ALLOW_PICKLE"),
        *("CPU_EXTENSION_PATH", "CACHE_DIR", "CONCH_OV_CACHE_DIR"),
    )
}
CHOOSES_CODE["/dev/shm/evil.so"] = {"model_operations": {"op_library_filename": ["/dev/shm/evil.so"]}}
CHOOSES_CODE |= {
    name: {
        "optimization": {
            "execution_accelerators": {
                "gpu_execution_accelerator": [
                    {"name": "tensorrt", "parameters": {name: "/tmp/of-the-client"}}
                ]
            }
        }
    }
    for name in (
        *("trt_extra_plugin_lib_paths", "trt_engine_cache_path"),
        *("trt_timing_cache_path", "trt_ep_context_file_path"),
    )
}


@pytest.fixture(scope="module")
def far() -> str:
    """An address of this machine from which calls do not look local."""
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
        try:
            probe.connect(("203.0.113.1", 9))  # sends nothing
        except OSError:
            pytest.skip("this machine has no address but those of the loopback interface")
        host: str = probe.getsockname()[0]
    return host


def rest_load(
    server: AnyServer, host: str, headers: Mapping[str, str] | None = None, **options: Any
) -> tuple[int, str]:
    """Loads model `m` with files over REST; status and text of the answer."""
    parameters = {
        key: value if isinstance(value, str) else base64.b64encode(value).decode()
        for key, value in files(v1=7).items()
    }
    port = server.http_address.rpartition(":")[2]
    url = f"{'https' if 'verify' in options else 'http'}://{host}:{port}/v2/repository/models/m/load"
    response = httpx.post(url, json={"parameters": parameters}, headers=headers, **options)
    return response.status_code, response.text


def refused(text: str) -> bool:
    return "brings a file ('file:1/model.py')" in text and "--allow-model-upload" in text


@pytest.mark.process
def test_files_come_from_this_machine_only(tmp_path: Path, far: str) -> None:
    write_number(tmp_path, "m")
    with (
        serving_process(tmp_path, flags=[EXPLICIT]) as server,
        closing(RawClient(server.address)) as near,
        closing(RawClient(f"{far}:{server.port}")) as away,
    ):
        (said,) = [line for line in server.output.splitlines() if line.startswith("open: ")]
        assert "loading models to all clients (gRPC, HTTP); with files to this machine (gRPC, HTTP)" in said
        code, text = load(away, "m", files(v1=7))
        assert code == "PERMISSION_DENIED"
        assert refused(text)
        status, text = rest_load(server, far)
        assert status == 403
        assert refused(text)
        # What a proxy on this machine forwards is not from this machine.
        assert rest_load(server, "127.0.0.1", {"X-Forwarded-For": "198.51.100.7"})[0] == 403
        forwarded = service_pb2.RepositoryModelLoadRequest(model_name="m")
        forwarded.parameters["file:1/model.py"].bytes_param = b""
        metadata = [("x-forwarded-for", "198.51.100.7")]
        assert outcome(lambda: near("RepositoryModelLoad", forwarded, metadata))[0] == "PERMISSION_DENIED"
        for name, fields in CHOOSES_CODE.items():
            code, text = load(away, "m", {"config": config_json(**fields)})
            assert code == "PERMISSION_DENIED", name
            assert name in text and "--allow-model-upload" in text
        assert load(away, "m", {"config": config_json()}) == {}  # loads without files are another matter
        assert answer(away, "m") == 1.0
        assert load(near, "m", files(v1=5)) == {}
        assert answer(away, "m") == 5.0
        assert rest_load(server, "127.0.0.1")[0] == 200
        assert answer(away, "m") == 7.0


def test_where_loading_is_not_allowed_the_mode_is_said_first(tmp_path: Path, far: str) -> None:
    write_number(tmp_path, "m")
    with serving(tmp_path) as server, closing(RawClient(f"{far}:{server.port}")) as away:
        code, text = load(away, "m", files(v1=7))
        assert code == "UNAVAILABLE"
        assert text.startswith("explicit model load / unload is not allowed if polling is enabled")
        assert rest_load(server, far)[0] == 503


def test_the_operator_takes_files_from_all_clients(tmp_path: Path, far: str) -> None:
    write_number(tmp_path, "m")
    with (
        serving(tmp_path, flags=[EXPLICIT, "--allow-model-upload"]) as server,
        closing(RawClient(f"{far}:{server.port}")) as away,
    ):
        assert load(away, "m", files(v1=5)) == {}
        assert answer(away, "m") == 5.0
        assert rest_load(server, far)[0] == 200


def test_files_from_callers_with_a_restricted_key(tmp_path: Path, far: str) -> None:
    write_number(tmp_path, "m")
    flags = [
        EXPLICIT,
        "--grpc-restricted-protocol=model-repository:key=secret",
        "--http-restricted-api=model-repository:key=secret",
    ]
    request = service_pb2.RepositoryModelLoadRequest(model_name="m")
    request.parameters["config"].string_param = config_json()
    request.parameters["file:1/model.py"].bytes_param = files(v1=5)["file:1/model.py"]
    with serving(tmp_path, flags=flags) as server, closing(RawClient(f"{far}:{server.port}")) as away:
        away("RepositoryModelLoad", request, [("triton-grpc-protocol-key", "secret")])
        assert answer(away, "m") == 5.0
        assert rest_load(server, far, {"key": "secret"})[0] == 200
        assert "This API is restricted" in rest_load(server, far)[1]


@pytest.mark.slow
def test_files_from_callers_with_a_certificate(tmp_path: Path, far: str) -> None:
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
            f"{far}:{server.port}", secure, [("grpc.ssl_target_name_override", "localhost")]
        )
        assert load(client, "m", files(v1=5)) == {}
        assert rest_load(server, far, verify=context)[0] == 200


def test_files_over_a_unix_socket(tmp_path: Path) -> None:
    write_number(tmp_path / "models", "m")
    address = f"unix:{tmp_path}/socket"
    with (
        serving(tmp_path / "models", flags=[EXPLICIT, f"--grpc-address={address}"]),
        closing(RawClient(address)) as client,
    ):
        assert load(client, "m", files(v1=5)) == {}


@pytest.mark.parametrize(
    ("peer", "local"),
    [
        ("ipv4:127.0.0.1:5", True),
        ("ipv4:127.9.9.9:5", True),
        ("ipv6:[::1]:5", True),
        ("ipv6:[::ffff:127.0.0.1]:5", True),
        ("unix:", True),
        ("unix:/run/conch", True),
        ("ipv4:10.0.0.1:5", False),
        ("ipv6:[::ffff:10.0.0.1]:5", False),
        ("ipv6:[fe80::1%eth0]:5", False),
        ("ipv4:127.0.0.1.example:5", False),
        ("", False),
    ],
)
def test_peers_on_this_machine(peer: str, local: bool) -> None:
    assert is_local_peer(peer) is local


def test_callers_behind_proxies_are_not_on_this_machine() -> None:
    assert is_loopback("::1")
    for name in ("x-forwarded-for", "forwarded", "via", "x-real-ip"):
        assert not UNGUARDED.may_upload(True, ["host", name])
        assert AccessGuard(None, "http", PortRules(any_upload=True)).may_upload(True, ["host", name])
    assert UNGUARDED.may_upload(True, ["host"])


def test_files_come_from_other_machines_if_loads_need_a_key() -> None:
    for category, allowed in (("model-repository", True), ("inference", False)):
        guard = AccessGuard(None, "http", PortRules({category: ("key", "value")}))
        assert guard.may_upload(False, ["host"]) is allowed
