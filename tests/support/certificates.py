"""Certificates for the tests of TLS."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from ipaddress import IPv4Address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_SIGNS = x509.KeyUsage(
    digital_signature=False,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    key_cert_sign=True,
    crl_sign=True,
    encipher_only=False,
    decipher_only=False,
)


class Authority:
    """Issues certificates into a directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"authority {directory.name}")])
        directory.mkdir()
        self.root = directory / "root.pem"
        certificate = (
            self._builder(self._name, self._key)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .add_extension(_SIGNS, critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.root.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def issue(
        self,
        name: str,
        ends: timedelta = timedelta(hours=1),
        usages: Sequence[x509.ObjectIdentifier] = (
            ExtendedKeyUsageOID.SERVER_AUTH,
            ExtendedKeyUsageOID.CLIENT_AUTH,
        ),
    ) -> tuple[Path, Path]:
        """A key and a certificate for localhost, with a URI for the name too; `ends` is from now."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        uri = x509.UniformResourceIdentifier(f"spiffe://conch.test/{name}")
        names = [x509.DNSName("localhost"), x509.IPAddress(IPv4Address("127.0.0.1")), uri]
        certificate = (
            self._builder(subject, key, ends)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        files = (self._directory / f"{name}.key", self._directory / f"{name}.pem")
        files[0].write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        files[1].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        return files

    def issue_by(self, client: str, name: str) -> tuple[Path, Path]:
        """A key and a certificate that a client of ours, which is no authority, has signed."""
        signer = Authority.__new__(Authority)
        signer._directory = self._directory
        signer._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, client)])
        key = serialization.load_pem_private_key((self._directory / f"{client}.key").read_bytes(), None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        signer._key = key
        files = signer.issue(name)
        with files[1].open("ab") as chain:
            chain.write((self._directory / f"{client}.pem").read_bytes())
        return files

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, ends: timedelta = timedelta(hours=1)
    ) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=1))
            .not_valid_after(now + ends)
            # Python's clients ask for key identifiers, and an authority's key usage, from 3.13 on.
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False
            )
        )
