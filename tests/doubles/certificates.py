"""A certificate authority for one process: made at the process's start, removed with its folder."""

import datetime
import ssl
import threading
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

DAYS = 30


class Authority:
    """Signs a certificate for each requested host; clients must trust `file`."""

    def __init__(self, folder: Path, protocols: Sequence[str] = ()) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._protocols = list(protocols)  # offered by ALPN
        self._folder, self._lock = folder, threading.Lock()
        self._contexts: dict[str, ssl.SSLContext] = {}
        self._key, self._host_key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "throw-away CA of tests/doubles")])
        self._certificate = self._signed(self._name, self._key.public_key(), None)
        self.file = folder / "ca.pem"
        self.file.write_bytes(self._certificate.public_bytes(serialization.Encoding.PEM))

    def context(self, host: str) -> ssl.SSLContext:
        """Return the server's side of TLS for the host."""
        with self._lock:
            if host not in self._contexts:
                self._contexts[host] = self._make(host)
            return self._contexts[host]

    def _make(self, host: str) -> ssl.SSLContext:
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host[:64])])
        certificate = self._signed(name, self._host_key.public_key(), host)
        pem = serialization.Encoding.PEM
        private = self._host_key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        file = self._folder / "host.pem"
        file.write_bytes(private + certificate.public_bytes(pem))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(file)
        if self._protocols:
            context.set_alpn_protocols(self._protocols)
        file.unlink()
        return context

    def _signed(self, name: x509.Name, key: ec.EllipticCurvePublicKey, host: str | None) -> x509.Certificate:
        """Return a certificate for the host, or the authority's own."""
        now = datetime.datetime.now(datetime.timezone.utc)
        is_ca = host is None
        usage = x509.KeyUsage(
            digital_signature=True,
            key_cert_sign=is_ca,
            crl_sign=is_ca,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            encipher_only=False,
            decipher_only=False,
        )
        builder = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=DAYS))
            .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        )
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        builder = builder.add_extension(issuer, critical=False)
        if host is not None:
            builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
            server = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
            builder = builder.add_extension(server, critical=False)
        return builder.sign(self._key, hashes.SHA256())
