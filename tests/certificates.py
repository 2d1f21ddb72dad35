"""Certificate authorities for tests, and files as an operator or a cert-manager writes them.

Entry point: `Authority.issue`.
"""

import datetime
import ipaddress
import itertools
import os
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

_HOUR = datetime.timedelta(hours=1)
_SERIALS = itertools.count(1000)


class CertificateFiles(NamedTuple):
    """Paths of PEM files."""

    cert: Path
    key: Path
    ca: Path

    def flags(self, prefix: str = "tls") -> list[str]:
        """As a service's command line has them."""
        parts = (("cert", self.cert), ("key", self.key), ("ca", self.ca))
        flag = prefix.replace("_", "-")
        return [word for part, path in parts for word in (f"--{flag}-{part}", str(path))]


class Authority:
    """Signs certificates for this machine, or for other names."""

    def __init__(self, name: str = "test authority") -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        builder = self._builder(self._name, self._key)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), True)
        self.pem = builder.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM)

    def issue(
        self, folder: Path, *, names: tuple[str, ...] = ("localhost", "127.0.0.1")
    ) -> CertificateFiles:
        """Write a new certificate, its key and this authority into `folder`, each in one move."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0])])
        alternatives = x509.SubjectAlternativeName([_general_name(name) for name in names])
        builder = self._builder(subject, key).add_extension(alternatives, False)
        certificate = builder.sign(self._key, hashes.SHA256())
        secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        files = CertificateFiles(folder / "tls.crt", folder / "tls.key", folder / "ca.crt")
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(files.cert, certificate.public_bytes(Encoding.PEM))
        replace_file(files.key, secret)
        replace_file(files.ca, self.pem)
        return files

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey):
        now = datetime.datetime.now(datetime.UTC)
        return x509.CertificateBuilder(
            issuer_name=self._name,
            subject_name=subject,
            public_key=key.public_key(),
            serial_number=next(_SERIALS),
            not_valid_before=now - _HOUR,
            not_valid_after=now + 24 * _HOUR,
        )


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def replace_file(path: Path, data: bytes) -> None:
    """Readers see the old bytes or the new ones."""
    scratch = path.with_suffix(".new")
    scratch.write_bytes(data)
    os.replace(scratch, path)
