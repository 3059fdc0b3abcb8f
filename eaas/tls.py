"""TLS between the processes of a cluster: each shows its certificate, and believes those of its authorities.

A directory holds PEM files (`eaas certs` makes one for trying):

    ca.pem      the authorities that are believed; two of them while one takes over from the other
    ROLE.pem    the certificate of whoever runs as that role, and what leads from it to an authority
    ROLE.key    its private key

Names are roles, not addresses: a monitor shows a certificate for `monitor.eaas.internal` wherever it listens
(`server_name`), so that an expert server's certificate is of no use to whoever wants to pass for the monitor.
What the holder may call is in the certificate, too (`eaas.authority`).

The files are looked at with each new connection, and read again when they have changed.
"""

from __future__ import annotations

import os
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
"""In a directory of certificates: whom its holder believes."""

_MOST_BYTES = 1 << 20
_Stamp = tuple[tuple[int, int, int], ...]


def server_name(role: str) -> str:
    """The DNS name that is to be in the certificate of a server of that role."""
    return f"{role}.eaas.internal"


@dataclass(frozen=True, repr=False)
class _Material:
    """The three files' bytes. Not to be printed."""

    ca: bytes
    certificate: bytes
    key: bytes


class Identity:
    """Who a process is: its certificate, its key, and whom it believes. Any thread may use it.

    Args:
        directory: Of the PEM files.
        role: Whose certificate; "operator" for people and their programs.

    Raises:
        ConfigError: A file is missing, is no PEM, or everybody may read the key; the key is not the
            certificate's.
    """

    def __init__(self, directory: Path, role: str) -> None:
        self.directory = directory
        self.role = role
        self._paths = tuple(directory / name for name in (CA_FILE, f"{role}.pem", f"{role}.key"))
        self._lock = threading.Lock()
        self._stamp = self._look()
        self._material = self._read()
        self._version = 1
        # What cannot be used is told once, and not with every connection.
        self._complaint = ""

    def __repr__(self) -> str:
        return f"Identity({str(self.directory)!r}, {self.role!r})"

    @property
    def version(self) -> int:
        """Rises when the files have changed."""
        return self._now()[0]

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """For a channel that connects from now on: a channel does not read them again."""
        _, now = self._now()
        return grpc.ssl_channel_credentials(now.ca, now.key, now.certificate)

    def server_credentials(self) -> grpc.ServerCredentials:
        """For a port: each new connection is shown the newest certificate, and has to show one itself."""
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

    def _now(self) -> tuple[int, _Material]:
        """The newest files that can be used. Files are replaced one by one: halfway the former ones count."""
        with self._lock:
            try:
                stamp = self._look()
                if stamp != self._stamp:
                    self._material = self._read()
                    self._stamp = stamp
                    self._version += 1
                    self._complaint = ""
                    _log.info("new certificates of %s", self.directory)
            except ConfigError as error:
                if str(error) != self._complaint:
                    self._complaint = str(error)
                    _log.warning("going on with the former certificates: %s", error)
            return self._version, self._material

    def _look(self) -> _Stamp:
        found = []
        for path in self._paths:
            try:
                status = path.stat()
            except OSError as error:
                raise ConfigError(
                    f"{path}: {error.strerror}; `eaas certs` makes certificates for trying"
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
                raise ConfigError(f"{path}: everybody may read this key; chmod 600 it")
            return file.read(_MOST_BYTES)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error


def _check(paths: tuple[Path, ...], ca: bytes, certificate: bytes, key: bytes) -> None:
    """gRPC says nothing of files that it cannot use but "handshake failed", with each connection."""
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
        # What the library says of it could hold a part of it.
        raise ConfigError(f"{key_path}: no PEM private key without a password") from error
    if public_key != certified_key:
        raise ConfigError(f"{key_path} is not the key of {certificate_path}")
