"""Mutual TLS between the processes of a cluster.

A directory holds PEM files (`eaas certs` creates one for trials):

    ca.pem      trusted authorities; two during a rotation
    ROLE.pem    certificate chain of the role
    ROLE.key    its private key

Certificates name roles, not addresses: a monitor has a certificate for `monitor.eaas.internal` wherever it
listens (`server_name`), so an expert server's certificate cannot impersonate the monitor. The certificate
also decides which calls its holder may make (`eaas.net.authorisation`).

Each new connection checks the files for changes and reads changed ones again.
"""

from __future__ import annotations

import os
import ssl
import stat
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from eaas.errors import ConfigError
from eaas.log import get_logger

__all__ = ["CA_FILE", "Identity", "server_name"]

_log = get_logger(__name__)

CA_FILE = "ca.pem"
"""File of trusted authorities in a directory of certificates."""

_MOST_BYTES = 1 << 20
_Stamp = tuple[tuple[int, int, int], ...]


def server_name(role: str) -> str:
    """The DNS name in the certificate of a role's servers, wherever they listen; callers require it."""
    return f"{role}.eaas.internal"


@dataclass(frozen=True, repr=False)
class _Material:
    """Contents of the three PEM files. Never print it."""

    ca: bytes
    certificate: bytes
    key: bytes


class Identity:
    """A process's TLS certificate, key and trusted authorities. Thread-safe.

    Args:
        directory: Directory of the PEM files.
        role: Role of the certificate; "operator" for people and their programs.

    Raises:
        ConfigError: A file is missing or not PEM, the key is readable by all users or does not match the
            certificate.
    """

    def __init__(self, directory: Path, role: str) -> None:
        self.directory = directory
        self.role = role
        self._paths = tuple(directory / name for name in (CA_FILE, f"{role}.pem", f"{role}.key"))
        self._lock = threading.Lock()
        self._stamp = self._look()
        self._material = self._read()
        self._version = 1
        # The last problem logged, so that each is logged once and not with every connection.
        self._logged = ""

    def __repr__(self) -> str:
        return f"Identity({str(self.directory)!r}, {self.role!r})"

    @property
    def version(self) -> int:
        """Generation of the loaded certificates; reading it checks the files and reloads changed ones.

        A rise makes `MonitorConnection` connect anew.
        """
        return self._now()[0]

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Make gRPC credentials for a new client channel; an existing channel keeps its own."""
        _, now = self._now()
        return grpc.ssl_channel_credentials(now.ca, now.key, now.certificate)

    def server_credentials(self) -> grpc.ServerCredentials:
        """gRPC credentials for a port: new connections use the newest files and need a client certificate."""
        given, first = self._now()

        def renewed() -> Any:
            nonlocal given
            version, now = self._now()
            if version == given:
                return None
            given = version
            return _configuration(now)

        return grpc.dynamic_ssl_server_credentials(
            _configuration(first), renewed, require_client_authentication=True
        )

    def client_context(self) -> ssl.SSLContext:
        """Make the settings of a new connection without gRPC to a process of the cluster."""
        return self._context(ssl.Purpose.SERVER_AUTH)

    def server_context(self) -> ssl.SSLContext:
        """Make the settings of a new connection without gRPC from a process, which shows a certificate."""
        return self._context(ssl.Purpose.CLIENT_AUTH)

    def _context(self, purpose: ssl.Purpose) -> ssl.SSLContext:
        _, now = self._now()
        context = ssl.create_default_context(purpose, cadata=now.ca.decode())
        context.verify_mode = ssl.CERT_REQUIRED
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        _, certificate, key = self._paths
        context.load_cert_chain(certificate, key)
        return context

    def _now(self) -> tuple[int, _Material]:
        """Return the newest valid files. Files are replaced one by one; old ones serve until all match."""
        with self._lock:
            try:
                stamp = self._look()
                if stamp != self._stamp:
                    self._material = self._read()
                    self._stamp = stamp
                    self._version += 1
                    self._logged = ""
                    _log.info("read new certificates from %s", self.directory)
            except ConfigError as error:
                if str(error) != self._logged:
                    self._logged = str(error)
                    _log.warning("keeping the old certificates: %s", error)
            return self._version, self._material

    def _look(self) -> _Stamp:
        found = []
        for path in self._paths:
            try:
                status = path.stat()
            except OSError as error:
                raise ConfigError(
                    f"{path}: {error.strerror}; run `eaas certs` to create test certificates"
                ) from error
            found.append((status.st_ino, status.st_mtime_ns, status.st_size))
        return tuple(found)

    def _read(self) -> _Material:
        ca, certificate, key = (_bytes_of(path) for path in self._paths)
        _check(self._paths, ca, certificate, key)
        return _Material(ca, certificate, key)


def _configuration(material: _Material) -> Any:
    return grpc.ssl_server_certificate_configuration(
        [(material.key, material.certificate)], material.ca
    )


def _bytes_of(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            if path.suffix == ".key" and os.fstat(file.fileno()).st_mode & stat.S_IROTH:
                raise ConfigError(f"{path}: all users may read this key; chmod 600 it")
            return file.read(_MOST_BYTES)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error


def _check(paths: tuple[Path, ...], ca: bytes, certificate: bytes, key: bytes) -> None:
    """Check the PEM files, because for bad ones gRPC only reports "handshake failed" with each connection."""
    from cryptography import x509
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    ca_path, certificate_path, key_path = paths
    try:
        x509.load_pem_x509_certificates(ca)
    except ValueError as error:
        raise ConfigError(f"{ca_path}: no PEM certificates") from error
    try:
        certified_key = x509.load_pem_x509_certificates(certificate)[0].public_key()
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{certificate_path}: no PEM certificate") from error
    try:
        public_key = load_pem_private_key(key, None).public_key()
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        # The library's message may contain a part of the key.
        raise ConfigError(f"{key_path}: no PEM private key without a password") from error
    if public_key != certified_key:
        raise ConfigError(f"{key_path} is not the key of {certificate_path}")
