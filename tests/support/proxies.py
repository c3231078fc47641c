"""Proxies before the gRPC port: Envoy, nginx and HAProxy, as processes."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from socket import create_connection

from tests.support.servers import WAIT_S, eventually, free_port

HOME = Path(os.environ.get("CONCH_PROXIES", Path.home() / ".cache" / "conch-tests" / "proxies"))
"""Directory of Envoy; see tests/setup_proxies.sh."""

_NGINX = """
daemon off;
pid {directory}/nginx.pid;
error_log stderr;
worker_processes 1;
events {{ }}
http {{
    access_log off;
    client_body_temp_path {directory}/body;
    proxy_temp_path {directory}/proxy;
    fastcgi_temp_path {directory}/fastcgi;
    uwsgi_temp_path {directory}/uwsgi;
    scgi_temp_path {directory}/scgi;
    client_max_body_size 0;
    upstream conch {{ server 127.0.0.1:{target}; keepalive 4; }}
    server {{
        listen 127.0.0.1:{port} http2;
        location / {{ grpc_pass grpc://conch; }}
    }}
}}
"""
_HAPROXY = """
defaults
    mode http
    timeout connect 30s
    timeout client 60s
    timeout server 60s
frontend clients
    bind 127.0.0.1:{port} proto h2
    default_backend conch
backend conch
    server conch 127.0.0.1:{target} proto h2
"""
_ENVOY = """
static_resources:
  listeners:
  - address: {{ socket_address: {{ address: 127.0.0.1, port_value: {port} }} }}
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: clients
          codec_type: HTTP2
          route_config:
            virtual_hosts:
            - name: conch
              domains: ["*"]
              routes:
              - match: {{ prefix: "/" }}
                route: {{ cluster: conch, timeout: 0s }}
          http_filters:
          - name: envoy.filters.http.router
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router
  clusters:
  - name: conch
    type: STATIC
    typed_extension_protocol_options:
      envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
        "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
        explicit_http_config: {{ http2_protocol_options: {{ }} }}
    load_assignment:
      cluster_name: conch
      endpoints:
      - lb_endpoints:
        - endpoint: {{ address: {{ socket_address: {{ address: 127.0.0.1, port_value: {target} }} }} }}
"""  # noqa: E501 - type URLs


def _found(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")


def _envoy() -> str | None:
    return shutil.which("envoy", path=str(HOME / "envoy" / "_bin"))


@dataclass(frozen=True)
class Proxy:
    """A kind of proxy.

    Attributes:
        program: Finds it; None if it is not installed.
        config: Its config, with the fields `port`, `target` and `directory`.
        arguments: Its command line, with the field `config` for the path of the config.
    """

    program: Callable[[], str | None]
    config: str
    arguments: tuple[str, ...]


PROXIES = {
    "envoy": Proxy(
        _envoy, _ENVOY, ("-c", "{config}", "--use-dynamic-base-id", "--concurrency", "1", "-l", "warn")
    ),
    "nginx": Proxy(lambda: _found("nginx"), _NGINX, ("-e", "stderr", "-c", "{config}")),
    "haproxy": Proxy(lambda: _found("haproxy"), _HAPROXY, ("-db", "-f", "{config}")),
}

HTTP_NGINX = Proxy(
    PROXIES["nginx"].program,
    _NGINX.replace(" http2;", ";").replace("grpc_pass grpc:", "proxy_pass http:"),
    PROXIES["nginx"].arguments,
)
"""nginx before the HTTP port, which buffers responses by default."""


@contextmanager
def proxy_to(program: str, proxy: Proxy, target: int, directory: Path) -> Iterator[int]:
    """Runs a proxy to a port of this machine; gives its own port."""
    port = free_port()
    directory.chmod(0o755)  # workers of nginx run as another user
    config = directory / "proxy.yaml"
    config.write_text(proxy.config.format(port=port, target=target, directory=directory))
    log = directory / "log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [program, *(argument.format(config=config) for argument in proxy.arguments)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:

        def listens() -> bool:
            assert process.poll() is None, log.read_text()
            try:
                create_connection(("127.0.0.1", port), WAIT_S).close()
            except OSError:
                return False
            return True

        eventually(listens, "the proxy listens")
        yield port
    finally:
        process.terminate()
        process.wait(WAIT_S)
