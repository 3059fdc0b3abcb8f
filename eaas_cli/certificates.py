"""A local certificate authority and a certificate for each role, to try TLS (`eaas certs`).

A production site has its own authority (cert-manager, Vault, step-ca): it only has to issue the same names
(docs/security.md).
"""

from __future__ import annotations

import ipaddress
import os
import secrets
import socket
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from eaas.errors import ConfigError
from eaas.net.authorisation import OPERATOR, role_uri
from eaas.net.tls import CA_FILE, server_name
from eaas.types import Role

__all__ = ["CA_KEY_FILE", "ROLES", "issue_again", "refuse_expired", "write_certificates"]

CA_KEY_FILE = "ca.key"
"""File of the authority's private key. Only `eaas certs` reads it."""

ROLES = (*(role.value for role in Role), OPERATOR)
"""Roles of a cluster that get a certificate."""

_SERVERS = tuple(role.value for role in Role if role is not Role.FRONTEND)
_LOCAL = ("localhost", "127.0.0.1", "::1")
# Certificates become valid this long before now, because clocks differ.
_EARLIER = timedelta(minutes=5)


def write_certificates(directory: Path, *, days: float, names: Sequence[str] = ()) -> None:
    """Write a new certificate authority, and a certificate and a key for each role. Key files have mode 0600.

    Args:
        directory: Created if missing. No file is overwritten.
        days: Lifetime of the certificates; the authority lives ten times as long.
        names: More host names or addresses for the servers' certificates. Only other programs check them
            (grpcurl).

    Raises:
        ConfigError: One of the files exists, or cannot be written.
    """
    files = [CA_FILE, CA_KEY_FILE, *(f"{role}{end}" for role in ROLES for end in (".pem", ".key"))]
    for given in names:
        _general_name(given)
    found = next((name for name in files if (directory / name).exists()), None)
    if found is not None:
        raise ConfigError(
            f"{directory / found} is there: give another directory, or --renew for new certificates "
            "by the authority that is in this one"
        )
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name(f"eaas authority {secrets.token_hex(4)}")
    authority = (
        _builder(name, name, key.public_key(), 10 * days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(key_cert_sign=True, crl_sign=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    _write_pair(directory, CA_FILE, authority, CA_KEY_FILE, key)
    issue_again(directory, days=days, names=names)


def refuse_expired(directory: Path) -> None:
    """Check the expiry dates of a directory's certificates before the launcher starts processes.

    Raises ConfigError: a certificate has expired or cannot be read.
    """
    files = (directory / CA_FILE, *(directory / f"{role}.pem" for role in ROLES))
    for path in filter(Path.exists, files):
        try:
            certificate = x509.load_pem_x509_certificate(path.read_bytes())
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path}: no PEM certificate that can be read") from error
        if certificate.not_valid_after_utc < datetime.now(UTC):
            raise ConfigError(
                f"{path} expired on {certificate.not_valid_after_utc:%Y-%m-%d}; "
                f"`eaas certs {directory} --renew` writes new certificates"
            )


def issue_again(directory: Path, *, days: float, names: Sequence[str] = ()) -> None:
    """Renew the certificate and the key of every role, signed by the existing authority.

    Running processes reload them automatically. `write_certificates` issues the first ones in this way, and
    has the same arguments and errors.
    """
    try:
        authority = x509.load_pem_x509_certificate((directory / CA_FILE).read_bytes())
        key = serialization.load_pem_private_key((directory / CA_KEY_FILE).read_bytes(), None)
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}; make it without --renew") from error
    except ValueError as error:
        raise ConfigError(f"{directory}: {CA_FILE} or {CA_KEY_FILE} cannot be read") from error
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    issuer_id = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    for role in ROLES:
        purposes = [ExtendedKeyUsageOID.CLIENT_AUTH]
        alternative: list[x509.GeneralName] = [x509.UniformResourceIdentifier(role_uri(role))]
        if role in _SERVERS:
            purposes.append(ExtendedKeyUsageOID.SERVER_AUTH)
            hosts = dict.fromkeys((*_LOCAL, socket.gethostname(), *names))
            alternative += [x509.DNSName(server_name(role)), *map(_general_name, hosts)]
        own_key = ec.generate_private_key(ec.SECP256R1())
        certificate = (
            _builder(_name(role), authority.subject, own_key.public_key(), days)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(digital_signature=True), critical=True)
            .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
            .add_extension(x509.SubjectAlternativeName(alternative), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(issuer_id),
                critical=False,
            )
            .sign(key, hashes.SHA256())
        )
        _write_pair(directory, f"{role}.pem", certificate, f"{role}.key", own_key)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: float
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    end = now + timedelta(days=days)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(now, end) - _EARLIER)
        .not_valid_after(end)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _usage(**allowed: bool) -> x509.KeyUsage:
    every = (
        *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment"),
        *("key_agreement", "key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
    )
    return x509.KeyUsage(**dict.fromkeys(every, False) | allowed)


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        pass
    try:
        return x509.DNSName(name)
    except ValueError as error:
        raise ConfigError(f"--san {name}: no host name and no address") from error


def _write_pair(
    directory: Path,
    certificate_file: str,
    certificate: x509.Certificate,
    key_file: str,
    key: ec.EllipticCurvePrivateKey,
) -> None:
    """Write a certificate and its key, each in one step, so that readers see the old one or the new one.

    Raises ConfigError: they cannot be written.
    """
    pem = certificate.public_bytes(serialization.Encoding.PEM)
    key_pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path, data, mode in (
            (directory / key_file, key_pem, 0o600),
            (directory / certificate_file, pem, 0o644),
        ):
            temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
            with os.fdopen(fd, "wb") as file:
                file.write(data)
            temporary.replace(path)
    except OSError as error:
        raise ConfigError(f"{directory}: {error.strerror}; give another directory") from error
