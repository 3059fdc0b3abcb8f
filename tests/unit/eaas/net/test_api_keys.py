"""API keys of the endpoint: accepted and refused keys, and changed files."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eaas.config import SecurityConfig, load_config
from eaas.config.environment import KEY_VARIABLE
from eaas.errors import ConfigError
from eaas.net.api_keys import ApiKeys, authorization
from eaas.net.listen_policy import guarded_keys, guarded_port


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    path = tmp_path / "keys"
    path.write_text("# whose: alice\nsk-alice-1\n\n  sk-bob-2  \n")
    path.chmod(0o600)
    return path


def test_each_key_of_the_file_is_accepted(file: Path) -> None:
    keys = ApiKeys(file)
    for header in (b"Bearer sk-alice-1", b"bearer sk-bob-2", b"BEARER  sk-bob-2"):
        assert keys.allow(header), header
    for header in (
        *(b"", b"sk-alice-1", b"Bearer", b"Bearer ", b"Basic sk-alice-1", b"Bearer sk-alice-"),
        *(b"Bearer sk-alice-11", b"Bearer SK-ALICE-1", b"Bearer sk-alice-1 sk-bob-2"),
        *(b"Bearer # whose: alice", b"Bearer whose:", b"Bearer sk-alice-1\n", b"Bearer \xff"),
    ):
        assert not keys.allow(header), header


@given(st.binary(max_size=40))
def test_nothing_else_is_accepted(tmp_path_factory: pytest.TempPathFactory, shown: bytes) -> None:
    file = tmp_path_factory.getbasetemp() / "one-key"
    if not file.exists():
        file.write_text("the-only-key-that-there-is")
        file.chmod(0o600)
    assert not ApiKeys(file).allow(shown)
    assert not ApiKeys(file).allow(b"Bearer " + shown)


def test_a_changed_file_is_used_at_once(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys = ApiKeys(file)
    with caplog.at_level(logging.INFO):
        file.write_text("sk-carol-3\n")
        assert keys.allow(b"Bearer sk-carol-3")
        assert not keys.allow(b"Bearer sk-alice-1")
        # Whatever becomes of the file, the endpoint is neither open to all nor closed to all.
        file.write_text("")
        for _ in range(3):
            assert keys.allow(b"Bearer sk-carol-3")
        file.unlink()
        assert keys.allow(b"Bearer sk-carol-3")
        assert not keys.allow(b"Bearer ")
    assert caplog.text.count("keeping the old keys") == 2
    assert "carol" not in caplog.text


@pytest.mark.parametrize(
    ("text", "mode", "said"),
    [
        ("", 0o600, "no key in it"),
        ("# nothing\n\n", 0o600, "no key in it"),
        ("two words\n", 0o600, "printable ASCII without blanks"),
        ("schlüssel\n", 0o600, "printable ASCII without blanks"),
        ("sk-1\n", 0o644, "all users may read these keys; chmod 600"),
    ],
)
def test_files_that_are_refused(file: Path, text: str, mode: int, said: str) -> None:
    file.write_text(text)
    file.chmod(mode)
    with pytest.raises(ConfigError, match=said) as caught:
        ApiKeys(file)
    assert not any(word in str(caught.value) for word in ("sk-1", "words", "schl"))


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file or directory; give a file with a key"):
        ApiKeys(tmp_path / "none")


def test_a_key_in_the_environment(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ApiKeys.of("") is None
    assert authorization() == {}
    monkeypatch.setenv(KEY_VARIABLE, "sk-env-9")
    keys = ApiKeys.of("")
    assert keys is not None
    assert keys.allow(b"Bearer sk-env-9")
    assert authorization() == {"Authorization": "Bearer sk-env-9"}
    assert authorization(file) == {"Authorization": "Bearer sk-alice-1"}
    # The variable is not an unknown setting.
    assert load_config().frontend.api_key_file == ""
    # An empty variable is an error.
    monkeypatch.setenv(KEY_VARIABLE, "")
    with pytest.raises(ConfigError, match="EAAS_API_KEY: no key in it"):
        ApiKeys.of("")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "[::1]", "127.9.9.9"])
def test_loopback_needs_no_key(host: str, file: Path) -> None:
    assert guarded_port(SecurityConfig(), "monitor", host) is None
    assert guarded_keys(SecurityConfig(), host, "") is None


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_other_hosts_need_tls_or_a_key_or_insecure(host: str, file: Path) -> None:
    with pytest.raises(ConfigError, match=r"give --tls DIR .* or --insecure") as caught:
        guarded_port(SecurityConfig(), "monitor", host)
    assert "\n" not in str(caught.value)
    with pytest.raises(
        ConfigError, match="give --api-key-file FILE or EAAS_API_KEY, or --insecure"
    ):
        guarded_keys(SecurityConfig(), host, "")
    meant = SecurityConfig(insecure=True)
    assert guarded_port(meant, "monitor", host) is None
    assert guarded_keys(meant, host, "") is None
    assert guarded_keys(SecurityConfig(), host, str(file)) is not None
