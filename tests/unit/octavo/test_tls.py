"""Certificate files: mistakes are named, renewed ones are taken up, half renewed ones are not."""

import shutil
import ssl
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import ConfigurationError
from octavo.tls import Renewal, TlsFiles
from tests.certificates import Authority, CertificateFiles, replace_file

AUTHORITY = Authority()


@pytest.fixture
def issued(tmp_path: Path) -> CertificateFiles:
    return AUTHORITY.issue(tmp_path)


def files_of(issued: CertificateFiles) -> TlsFiles:
    return TlsFiles("tls", *map(str, issued))


def test_files_that_fit_are_read(issued: CertificateFiles) -> None:
    material = files_of(issued).read()
    assert material == tuple(path.read_bytes() for path in issued)
    assert TlsFiles("tls", str(issued.cert), str(issued.key), "").read().ca is None


@pytest.mark.parametrize("part", ["cert", "key", "ca"])
def test_a_missing_file_is_named(issued: CertificateFiles, part: str) -> None:
    path: Path = getattr(issued, part)
    path.unlink()
    with pytest.raises(ConfigurationError, match=f"^OCTAVO_TLS_{part.upper()}: ") as caught:
        files_of(issued).read()
    assert str(path) in caught.value.message
    assert caught.value.param == f"tls_{part}"


def test_a_key_of_another_certificate_is_refused(issued: CertificateFiles, tmp_path: Path) -> None:
    other = AUTHORITY.issue(tmp_path / "other")
    shutil.copy(other.key, issued.key)
    with pytest.raises(ConfigurationError, match=r"^OCTAVO_TLS_KEY: .*is no key of the cert"):
        files_of(issued).read()


@pytest.mark.parametrize(("part", "variable"), [("cert", "KEY"), ("key", "KEY"), ("ca", "CA")])
def test_nonsense_is_refused(issued: CertificateFiles, part: str, variable: str) -> None:
    getattr(issued, part).write_text("no PEM")
    with pytest.raises(ConfigurationError, match=f"^OCTAVO_TLS_{variable}: "):
        files_of(issued).read()


def test_a_locked_key_is_refused_without_asking_for_its_password(issued: CertificateFiles) -> None:
    from cryptography.hazmat.primitives.serialization import (
        BestAvailableEncryption,
        Encoding,
        PrivateFormat,
        load_pem_private_key,
    )

    key = load_pem_private_key(issued.key.read_bytes(), None)
    locked = key.private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"locked")
    )
    issued.key.write_bytes(locked)
    with pytest.raises(ConfigurationError, match=r"^OCTAVO_TLS_KEY: "):
        files_of(issued).read()


def test_a_renewal_waits_until_all_files_fit(
    issued: CertificateFiles, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = files_of(issued)
    renewal: Renewal[Any] = Renewal(files, files.read)
    first = renewal.made
    assert renewal.renewed() is None
    other = AUTHORITY.issue(tmp_path / "other")
    replace_file(issued.cert, other.cert.read_bytes())
    assert renewal.renewed() is None
    assert renewal.made is first
    assert len([line for line in caplog.messages if "going on with the certificate" in line]) == 1
    # Nothing changed since: nothing is tried, and nothing logged, again.
    assert renewal.renewed() is None
    assert len(caplog.messages) == 1
    replace_file(issued.key, other.key.read_bytes())
    renewed = renewal.renewed()
    assert renewed is not None
    assert renewed.cert == other.cert.read_bytes()
    assert renewal.renewed() is None
    issued.cert.unlink()
    assert renewal.renewed() is None
    assert renewal.made is renewed


def test_contexts_check_what_they_load(issued: CertificateFiles) -> None:
    context = files_of(issued).context(ssl.PROTOCOL_TLS_SERVER)
    assert len(context.get_ca_certs()) == 1
