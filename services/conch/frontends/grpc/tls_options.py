"""TLS of the gRPC port."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class TlsOptions:
    """PEM contents for a TLS port.

    Attributes:
        private_key: The server's key.
        certificate: The server's certificate chain.
        client_root: Root certificates for clients; None does not ask clients for a certificate.
    """

    private_key: bytes = field(repr=False)
    certificate: bytes
    client_root: bytes | None = None
