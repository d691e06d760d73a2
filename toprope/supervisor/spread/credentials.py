"""Keys with which the nodes of one run recognize each other. The keeper makes them; they exist only in memory."""

from __future__ import annotations

import datetime
import os
import ssl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

_DAYS = 400
_HOUR = datetime.timedelta(hours=1)
_LONG_AGO = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)


def make_identity(seed: bytes | None = None) -> str:
    """Return a certificate with its key, in PEM. All members of a run show it, and accept no other one.

    Args:
        seed: 32 secret bytes, from which two machines make the same identity; None: make a new one.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ed25519

    # Ed25519 signs without chance, so everything in the certificate comes from the seed.
    key = ed25519.Ed25519PrivateKey.from_private_bytes(seed or os.urandom(32))
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "toprope-run")])
    now = datetime.datetime.now(datetime.UTC) if seed is None else _LONG_AGO
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number() if seed is None else 1)
        .not_valid_before(now - 24 * _HOUR)  # nodes have clocks of their own
        .not_valid_after(now + datetime.timedelta(days=_DAYS if seed is None else 100 * 365))
        .sign(key, None)
    )
    encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    private = key.private_bytes(encoding, form, serialization.NoEncryption())
    return (private + certificate.public_bytes(encoding)).decode()


def contexts(identity: str) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return the TLS contexts of servers and clients: each side shows the run's certificate and requires it."""
    pair = []
    with _private_file(identity) as path:
        for kind in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT):
            context = ssl.SSLContext(kind)
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.check_hostname = False  # the certificate itself is the identity, whatever the address
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(cadata=identity[identity.index("-----BEGIN CERTIFICATE") :])
            context.load_cert_chain(path)
            pair.append(context)
    return pair[0], pair[1]


@contextmanager
def _private_file(text: str) -> Iterator[str]:
    """Give the path of a file with this text, as OpenSSL reads keys from files only: in memory on Linux, elsewhere on
    disk for this user alone."""
    in_memory = hasattr(os, "memfd_create")
    descriptor, path = (os.memfd_create("identity"), "") if in_memory else tempfile.mkstemp()
    try:
        os.write(descriptor, text.encode())
        yield path or f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)
        if path:
            os.unlink(path)
