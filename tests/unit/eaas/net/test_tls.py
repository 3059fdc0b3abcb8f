"""A process's certificate: errors name the file, and changed files are used once they match."""

from __future__ import annotations

import ast
import logging
import shutil
from pathlib import Path

import pytest

from eaas.errors import ConfigError
from eaas.net.tls import Identity
from eaas_cli.certificates import issue_again
from tls_world import certificates

ROOT = Path(__file__).parents[4]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return certificates(tmp_path_factory.mktemp("tls") / "made")


@pytest.fixture
def directory(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "tls"))


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("ca.pem", None, r"ca\.pem: No such file or directory; run `eaas certs`"),
        ("monitor.pem", None, r"monitor\.pem: No such file or directory"),
        ("monitor.key", None, r"monitor\.key: No such file or directory"),
        ("ca.pem", "", r"ca\.pem: no PEM certificates"),
        ("monitor.pem", "certificate", r"monitor\.pem: no PEM certificate"),
        ("monitor.key", "-----BEGIN PRIVATE KEY-----\n", r"monitor\.key: no PEM private key"),
        ("monitor.key", "operator.key", r"monitor\.key is not the key of .*monitor\.pem"),
    ],
)
def test_an_error_names_the_unusable_file(
    directory: Path, name: str, text: str | None, said: str
) -> None:
    if text is None:
        (directory / name).unlink()
    elif (directory / text).is_file():
        shutil.copy2(directory / text, directory / name)
    else:
        (directory / name).write_text(text)
    with pytest.raises(ConfigError, match=said) as caught:
        Identity(directory, "monitor")
    assert "\n" not in str(caught.value)


def test_a_key_readable_by_all_is_refused(directory: Path) -> None:
    (directory / "monitor.key").chmod(0o644)
    with pytest.raises(ConfigError, match="all users may read this key; chmod 600"):
        Identity(directory, "monitor")
    # As Kubernetes mounts Secrets for a group.
    (directory / "monitor.key").chmod(0o640)
    Identity(directory, "monitor")


def test_new_files_are_used_when_all_match(
    directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = Identity(directory, "balancer")
    assert own.version == 1
    new = Path(shutil.copytree(directory, tmp_path / "new"))
    issue_again(new, days=1)
    with caplog.at_level(logging.INFO):
        shutil.copy2(new / "balancer.pem", directory)
        # The certificate does not match the key yet.
        assert [own.version, own.version] == [1, 1]
        assert caplog.text.count("keeping the old certificates") == 1
        shutil.copy2(new / "balancer.key", directory)
        assert [own.version, own.version] == [2, 2]
        (directory / "ca.pem").unlink()
        assert own.version == 2
    secret = (new / "balancer.key").read_text().splitlines()[1]
    assert secret not in caplog.text
    assert secret not in repr(own)
    assert secret not in repr(own.__dict__)


def test_every_channel_between_roles_has_an_identity() -> None:
    """A forgotten channel would be plain text."""
    found = 0
    for package in ("eaas", "attention_client", "expert_server", "monitor", "balancer"):
        for path in sorted((ROOT / package).rglob("*.py")):
            text = path.read_text()
            if path.name == "grpc_client.py" or "channel(" not in text:
                continue
            for node in ast.walk(ast.parse(text)):
                if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                    continue
                if node.func.id in ("channel", "open_channel"):
                    found += 1
                    assert len(node.args) == 3, f"{path}:{node.lineno}: role and identity"
    assert found >= 8
