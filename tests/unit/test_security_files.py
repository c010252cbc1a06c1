"""Certificates from files: what is refused and in which words, and what becomes of changed ones."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from pdcore.clock import ManualClock
from pdcore.errors import ConfigError
from pdcore.security import INTERNAL_NAME, InternalTls, PublicTls
from security.credentials import public_files
from security.files import PemFiles, Renewing
from tests.support.certificates import Authority

NOW = datetime.now(UTC)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


def internal(tls: InternalTls) -> PemFiles:
    return PemFiles("tls.internal", tls.cert_file, tls.key_file, tls.ca_file, own_name=tls.server_name)


def test_right_files_are_read(shared: Authority) -> None:
    tls = shared.internal_tls()
    pem = internal(tls).read()
    assert pem.certificate == Path(tls.cert_file).read_bytes()
    assert pem.authorities == Path(tls.ca_file).read_bytes()
    assert "PRIVATE" in pem.key.decode()
    assert "PRIVATE" not in repr(pem)
    assert public_files(shared.public(mutual=True)).current().authorities == pem.authorities


def missing(shared: Authority, folder: Path) -> InternalTls:
    tls = shared.internal_tls()
    return InternalTls(tls.cert_file, str(folder / "none.key"), tls.ca_file)


def a_folder(shared: Authority, folder: Path) -> InternalTls:
    tls = shared.internal_tls()
    return InternalTls(str(folder), tls.key_file, tls.ca_file)


def a_pipe(shared: Authority, folder: Path) -> InternalTls:
    os.mkfifo(folder / "pipe")
    return InternalTls(str(folder / "pipe"), shared.internal_tls().key_file, shared.ca_file)


def foreign_key(shared: Authority, folder: Path) -> InternalTls:
    tls = shared.internal_tls()
    return InternalTls(tls.cert_file, shared.issue("other", INTERNAL_NAME)[1], tls.ca_file)


def expired(shared: Authority, folder: Path) -> InternalTls:
    cert, key = shared.issue("old", INTERNAL_NAME, since=NOW - timedelta(days=9), until=NOW - timedelta(days=1))
    return InternalTls(cert, key, shared.ca_file)


def early(shared: Authority, folder: Path) -> InternalTls:
    cert, key = shared.issue("early", INTERNAL_NAME, since=NOW + timedelta(days=1), until=NOW + timedelta(days=9))
    return InternalTls(cert, key, shared.ca_file)


def other_name(shared: Authority, folder: Path) -> InternalTls:
    return InternalTls(*shared.issue("named", "worker-7.example"), shared.ca_file)


def other_authority(shared: Authority, folder: Path) -> InternalTls:
    return InternalTls(*Authority(folder).issue("x", INTERNAL_NAME), shared.ca_file)


def no_pem(shared: Authority, folder: Path) -> InternalTls:
    tls, text = shared.internal_tls(), folder / "text"
    text.write_text("nothing of the kind")
    return InternalTls(str(text), tls.key_file, tls.ca_file)


def no_authorities(shared: Authority, folder: Path) -> InternalTls:
    tls, text = shared.internal_tls(), folder / "text"
    text.write_text("nothing of the kind")
    return InternalTls(tls.cert_file, tls.key_file, str(text))


def locked(shared: Authority, folder: Path) -> InternalTls:
    tls, path = shared.internal_tls(), folder / "locked.key"
    key = serialization.load_pem_private_key(Path(tls.key_file).read_bytes(), None)
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"password"),
        )
    )
    return InternalTls(tls.cert_file, str(path), tls.ca_file)


@pytest.mark.parametrize(
    ("make", "key", "words"),
    [
        (missing, "key_file", "a readable file .No such file"),
        (a_folder, "cert_file", "a readable file .it is something else"),
        (a_pipe, "cert_file", "a readable file .it is something else"),
        (foreign_key, "key_file", "the private key of the certificate in .*internal.crt"),
        (expired, "cert_file", "has not expired"),
        (early, "cert_file", "valid already"),
        (other_name, "cert_file", f"name .*{INTERNAL_NAME}"),
        (other_authority, "cert_file", "an authority in tls.internal.ca_file"),
        (no_pem, "cert_file", "a PEM file"),
        (no_authorities, "ca_file", "a PEM file of certificates"),
        (locked, "key_file", "without a password"),
    ],
)
def test_what_is_refused(
    make: Callable[[Authority, Path], InternalTls], key: str, words: str, shared: Authority, tmp_path: Path
) -> None:
    tls = make(shared, tmp_path)
    with pytest.raises(ConfigError, match=words) as refused:
        internal(tls).read()
    assert refused.value.key == f"tls.internal.{key}"
    assert "PRIVATE" not in str(refused.value)


def test_an_expired_public_certificate_is_refused_whoever_it_is_from(shared: Authority) -> None:
    cert, key = shared.issue("past", "localhost", since=NOW - timedelta(days=9), until=NOW - timedelta(days=1))
    with pytest.raises(ConfigError, match="has not expired"):
        public_files(PublicTls(cert, key))


def test_new_files_are_used_and_bad_ones_are_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    authority, clock = Authority(tmp_path), ManualClock()
    tls = authority.internal_tls()
    renewing = Renewing(internal(tls), clock=clock, look_every_s=1.0)
    first = renewing.current()

    cert, key = authority.issue("next", INTERNAL_NAME)
    os.replace(cert, tls.cert_file)
    assert renewing.current() is first  # not looked at yet
    clock.advance(1.0)
    with caplog.at_level(logging.ERROR):
        assert renewing.current() is first  # the key is still the old one
        clock.advance(1.0)
        assert renewing.current() is first
    assert len(caplog.records) == 1
    assert renewing.version == 0

    os.replace(key, tls.key_file)
    clock.advance(1.0)
    second = renewing.current()
    assert second != first
    assert second.certificate == Path(tls.cert_file).read_bytes()
    assert renewing.version == 1
    clock.advance(1.0)
    assert renewing.current() is second

    os.remove(tls.key_file)
    clock.advance(1.0)
    assert renewing.current() is second
