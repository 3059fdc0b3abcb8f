"""The table of transports: ours, and those of other packages."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from eaas import transports
from eaas.errors import ConfigError
from installed_package import install

OTHERS = """
from eaas.transports import Transport
here = Transport("a:b", "c:d")
elsewhere = Transport("a:b", "c:d", "other_transports:why_not")
number = 5
def why_not(): return "no such card"
"""


@pytest.fixture(autouse=True)
def other_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {name: name for name in ("here", "elsewhere", "number", "gone")} | {"shm": "here"}
    install(tmp_path, monkeypatch, transports.GROUP, "other_transports", given, OTHERS)


def test_a_package_adds_a_transport_and_replaces_none(caplog: pytest.LogCaptureFixture) -> None:
    assert transports.names() == ("shm", "grpc", "nixl", "elsewhere", "gone", "here", "number")
    assert transports.known("here") == transports.Transport("a:b", "c:d")
    assert transports.known("shm").server.startswith("expert_server.")
    assert transports.known("elsewhere").why_not() == "no such card"
    with caplog.at_level(logging.WARNING):
        usable = transports.usable()
    assert {"shm", "grpc", "here"} <= set(usable) <= {"shm", "grpc", "nixl", "here"}
    assert "'gone'" in caplog.text


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("rdma", "'rdma' is none of auto, shm, grpc, nixl, elsewhere, gone, here, number"),
        ("number", r"'number' \(other_transports:number\) is no eaas.transports.Transport"),
        ("gone", r"'gone' \(other_transports:gone\): .*gone"),
    ],
)
def test_one_that_cannot_be_used_is_named(name: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        transports.known(name)
