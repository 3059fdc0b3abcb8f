"""Arguments of a local cluster's processes."""

from __future__ import annotations

import errno
import socket
from functools import partial
from pathlib import Path

import pytest

from eaas.config import load_config
from eaas.errors import ConfigError, PortInUseError
from eaas_cli.local.arguments import (
    check_endpoint_port,
    frontend_words,
    make_log_dir,
    vllm_words,
)
from eaas_cli.local.process import ChildProcess


def test_the_names_of_the_model_reach_both_engines() -> None:
    named = load_config(frontend={"served_model_name": ["big", "gpt-4o"]})
    for words in (partial(frontend_words, operator_page=False), vllm_words):
        given = words(named, "a", "m:1", Path("/models/demo"))
        assert given[-4:] == ("--served-model-name", "big", "--served-model-name", "gpt-4o")
        plain = words(load_config(), "a", "m:1", Path("/models/demo"))
        assert "--served-model-name" not in plain


def test_vllm_has_the_port_of_the_endpoint_and_the_page_a_free_one() -> None:
    config = load_config(frontend={"port": 8123})
    given = "a", "m:1", Path("/models/demo")
    page = frontend_words(config, *given, operator_page=True, page_only=True)
    assert {"--page-only", "--operator-page"} < set(page)
    for words, port in ((vllm_words(config, *given), "8123"), (page, "0")):
        assert words[words.index("--port") + 1] == port


def test_a_log_directory_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    # In /proc not even root makes a file.
    for wanted in (tmp_path / "file", tmp_path / "file" / "x", Path("/proc/self")):
        with pytest.raises(ConfigError, match=f"--log-dir {wanted}: .*give another directory"):
            make_log_dir(wanted)
    make_log_dir(tmp_path / "new" / "logs")
    assert not list((tmp_path / "new" / "logs").iterdir())


def test_a_log_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "monitor.log").mkdir()
    with pytest.raises(ConfigError, match=r"the log of monitor: .*--log-dir"):
        ChildProcess("monitor", ("--version",), tmp_path)


def test_the_endpoints_port_is_free_or_refused() -> None:
    port = check_endpoint_port("127.0.0.1", 0)
    in_use = pytest.raises(PortInUseError, match=rf"127\.0\.0\.1:{port}: .* --port, or stop")
    with socket.create_server(("127.0.0.1", port)), in_use:
        check_endpoint_port("127.0.0.1", port)
    assert check_endpoint_port("[127.0.0.1]", port) == port
    with pytest.raises(ConfigError, match=r"--host 192\.0\.2\.1: .*an address of this machine"):
        check_endpoint_port("192.0.2.1", 0)


def test_a_port_that_needs_more_rights_is_not_called_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoRights(socket.socket):
        def bind(self, address: object) -> None:
            raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(socket, "socket", NoRights)
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:80: Permission denied; .* --port$"):
        check_endpoint_port("127.0.0.1", 80)
