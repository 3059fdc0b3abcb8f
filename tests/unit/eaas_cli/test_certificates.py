"""`eaas certs`: files, names, renewal, and refusals."""

from __future__ import annotations

import stat
from datetime import timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID
from typer.testing import CliRunner

from eaas.errors import ConfigError
from eaas_cli.certificates import ROLES, issue_again, refuse_expired, write_certificates
from eaas_cli.commands import app

FILES = {f"{name}{end}" for name in ("ca", *ROLES) for end in (".pem", ".key")}


def read(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def check_files(directory: Path) -> None:
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()}
    assert modes.keys() == FILES
    assert {mode for name, mode in modes.items() if name.endswith(".key")} == {0o600}


def names_of(certificate: x509.Certificate) -> x509.SubjectAlternativeName:
    return certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value


def test_the_command_writes_an_authority_and_every_role(tmp_path: Path) -> None:
    directory = tmp_path / "tls"
    words = f"certs {directory} --days 7 --san monitor.example --san 10.0.0.7"
    result = CliRunner().invoke(app, words.split())
    assert result.exit_code == 0, result.output
    check_files(directory)
    authority = read(directory / "ca.pem")
    for role in ROLES:
        certificate = read(directory / f"{role}.pem")
        certificate.verify_directly_issued_by(authority)
        lasts = certificate.not_valid_after_utc - certificate.not_valid_before_utc
        assert timedelta(days=7) <= lasts < timedelta(days=7, hours=1)
        names = names_of(certificate)
        assert names.get_values_for_type(x509.UniformResourceIdentifier) == [f"eaas://{role}"]
        purposes = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        serves = role in ("monitor", "balancer", "expert-server", "attention-client")
        assert (ExtendedKeyUsageOID.SERVER_AUTH in purposes) == serves
        dns = names.get_values_for_type(x509.DNSName)
        assert (f"{role}.eaas.internal" in dns) == serves
        assert ("monitor.example" in dns) == serves
        assert [n for n in dns if n.endswith(".eaas.internal")] == [
            f"{role}.eaas.internal"
        ] * serves
        key = load_pem_private_key((directory / f"{role}.key").read_bytes(), None)
        assert key.public_key() == certificate.public_key()


@pytest.mark.parametrize("there", ["ca.key", "ca.pem", "operator.pem", "monitor.key"])
def test_nothing_is_overwritten(tmp_path: Path, there: str) -> None:
    (tmp_path / there).write_text("precious")
    with pytest.raises(ConfigError, match=rf"{there} is there: give another directory"):
        write_certificates(tmp_path, days=1)
    assert [path.name for path in tmp_path.iterdir()] == [there]
    assert (tmp_path / there).read_text() == "precious"


def test_renewed_by_the_same_authority(tmp_path: Path) -> None:
    directory = tmp_path / "tls"
    write_certificates(directory, days=1)
    before = {path.name: path.read_bytes() for path in directory.iterdir()}
    result = CliRunner().invoke(app, ["certs", str(directory), "--renew"])
    assert result.exit_code == 0, result.output
    check_files(directory)
    same = {name for name in before if before[name] == (directory / name).read_bytes()}
    assert same == {"ca.pem", "ca.key"}
    for role in ROLES:
        read(directory / f"{role}.pem").verify_directly_issued_by(read(directory / "ca.pem"))


def test_impossible_requests_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ca\.pem: No such file or directory; make it without"):
        issue_again(tmp_path, days=1)
    (tmp_path / "ca.pem").write_text("-----BEGIN CERTIFICATE-----")
    (tmp_path / "ca.key").write_text("no key")
    with pytest.raises(ConfigError, match="cannot be read"):
        issue_again(tmp_path, days=1)
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ConfigError, match="give another directory"):
        write_certificates(file / "tls", days=1)
    with pytest.raises(ConfigError, match=r"--san hällo: no host name"):
        write_certificates(tmp_path / "new", days=1, names=["hällo"])
    assert not (tmp_path / "new").exists()


def test_a_cluster_does_not_start_with_certificates_that_have_expired(tmp_path: Path) -> None:
    directory = tmp_path / "tls"
    write_certificates(directory, days=1)
    refuse_expired(directory)
    issue_again(directory, days=-1)
    result = CliRunner().invoke(app, ["up", "--model", str(tmp_path), "--tls", str(directory)])
    assert isinstance(result.exception, ConfigError)
    assert "expert-server.pem expired on 20" in str(result.exception)
    assert f"`eaas certs {directory} --renew`" in str(result.exception)
    issue_again(directory, days=1)
    (directory / "monitor.pem").write_text("nonsense")
    with pytest.raises(ConfigError, match=r"monitor.pem: no PEM certificate"):
        refuse_expired(directory)
