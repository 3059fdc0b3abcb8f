"""`eaas up` with certificates and keys: all commands work, and no secret is printed."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from eaas.net.grpc_client import channel
from eaas.net.tls import Identity
from eaas.rpc.v1 import balancer_pb2, balancer_pb2_grpc
from eaas.types import Role

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]

KEY = "sk-e2e-0123456789abcdef"
LONG = 96
PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def secrets_at(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the key file; `eaas certs` writes its `tls`."""
    directory = tmp_path_factory.mktemp("secrets")
    file = directory / "keys"
    file.write_text(f"# of this test\n{KEY}\n")
    file.chmod(0o600)
    return directory


@pytest.fixture(scope="module")
def up(
    checkpoint: Callable[..., Path], start_up: Callable[..., Any], secrets_at: Path
) -> Iterator[Any]:
    tls = secrets_at / "tls"
    options = ("--servers", "2", "--transport", "grpc", "--log-dir", str(secrets_at / "logs"))
    options += ("--tls", str(tls), "--api-key-file", str(secrets_at / "keys"))
    running = start_up(checkpoint("qwen3_moe"), *options)
    # Nothing starts without them.
    assert running.process.wait(60) == 2
    assert "ca.pem: No such file or directory; run `eaas certs`" in running.output
    made = running.home.run("certs", str(tls))
    assert (made.returncode, made.stderr) == (0, "")
    running = start_up(checkpoint("qwen3_moe"), *options)
    running.wait_serving()
    yield running
    running.end()


class Operator:
    """A user with a certificate and a key, who records all output."""

    def __init__(self, up: Any, secrets_at: Path) -> None:
        self._up = up
        self.endpoint = up.endpoint
        self.key = ("--api-key-file", str(secrets_at / "keys"))
        self.tls = ("--tls", str(secrets_at / "tls"))
        self.printed: list[str] = []

    def run(self, *words: str, code: int = 0, endpoint: bool = True) -> str:
        where = ("--endpoint", self.endpoint) if endpoint else ()
        done = self._up.home.run(*words, *where, timeout=120)
        self.printed += [done.stdout, done.stderr]
        assert done.returncode == code, done.stderr
        return done.stdout if code == 0 else done.stderr

    def members(self) -> list[dict[str, Any]]:
        headers = {"Authorization": f"Bearer {KEY}"}
        response = httpx.get(f"{self.endpoint}/eaas/v1/status", headers=headers, timeout=10)
        self.printed.append(response.text)
        return list(response.json()["members"])

    def member(self, name: str) -> dict[str, Any]:
        return next(m for m in self.members() if m["id"] == name)


@pytest.fixture(scope="module")
def operator(up: Any, secrets_at: Path) -> Operator:
    return Operator(up, secrets_at)


def test_the_printed_lines_work(up: Any, operator: Operator) -> None:
    (curl,) = re.findall(r"^curl .*$", up.output, re.MULTILINE)
    done = subprocess.run(["bash", "-c", curl], capture_output=True, text=True, timeout=60)
    assert '"content"' in done.stdout, done.stdout + done.stderr
    (status,) = re.findall(r"^status: +\S+eaas(.*)$", up.output, re.MULTILINE)
    done = up.home.run(*status.split())
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("SERVING") == 6


def test_commands_without_key_and_certificate(operator: Operator) -> None:
    join = ("--join", operator.member("monitor")["address"])
    with ThreadPoolExecutor() as pool:
        # Both try for ten seconds.
        joins = [
            pool.submit(operator.run, *words, *join, code=2, endpoint=False)
            for words in (("autoscale", "--dry-run"), ("balancer",))
        ]
        for words in (("status",), ("generate", "Hello"), ("scale", "3", *operator.tls)):
            assert "401): No valid API key" in operator.run(*words, code=2)
        for words in (("scale", "3"), ("top", "--once"), ("plan",), ("autoscale", "--dry-run")):
            said = operator.run(*words, *operator.key, code=2)
            assert said.count("\n") == 1
            assert f"this cluster asks for certificates: give {' '.join(operator.tls)}" in said
        for each in joins:
            assert "give --tls DIR" in each.result()
    # In plain text; and with a certificate of another role.
    address = operator.member("balancer")["address"]
    with channel(address) as line:
        stub = balancer_pb2_grpc.BalancerServiceStub(line)
        with pytest.raises(grpc.RpcError) as caught:
            stub.GetPlacement(balancer_pb2.GetPlacementRequest())
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    own = Identity(Path(operator.tls[1]), Role.EXPERT_SERVER.value)
    with channel(address, Role.BALANCER.value, own) as line:
        stub = balancer_pb2_grpc.BalancerServiceStub(line)
        assert stub.GetPlacement(balancer_pb2.GetPlacementRequest()).placement.epoch == 1
        with pytest.raises(grpc.RpcError) as caught:
            stub.Scale(balancer_pb2.ScaleRequest(servers=1))
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED


def test_arenas_have_mode_0600(operator: Operator) -> None:
    # By file: a server has several descriptors of one.
    arenas: dict[int, os.stat_result] = {}
    for name in ("expert-server-0", "expert-server-1"):
        for fd in Path(f"/proc/{operator.member(name)['pid']}/fd").iterdir():
            # Some are closed while one looks.
            with contextlib.suppress(FileNotFoundError):
                if os.readlink(fd).startswith("/dev/shm/"):
                    arenas[fd.stat().st_ino] = fd.stat()
    assert len(arenas) == 2
    assert {status.st_mode & 0o777 for status in arenas.values()} == {0o600}
    assert {status.st_uid for status in arenas.values()} == {os.geteuid()}


def test_row_33_everything_goes_on_while_certificates_change(up: Any, operator: Operator) -> None:
    """Row 33: certificates rotated under load: 0 failed calls."""
    words = ("generate", "Once upon a time", "--max-tokens", str(LONG), *operator.key)
    expected = operator.run(*words)
    texts: list[str] = []
    over = threading.Event()

    def ask() -> None:
        body = {"prompt": "Once upon a time", "max_tokens": LONG, "temperature": 0}
        headers = {"Authorization": f"Bearer {KEY}"}
        with httpx.Client(headers=headers, timeout=PATIENCE_S) as client:
            while not over.wait(0.3):
                answer = client.post(f"{operator.endpoint}/v1/completions", json=body)
                texts.append(answer.json()["choices"][0]["text"] if answer.is_success else "")

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        renewed = up.home.run("certs", operator.tls[1], "--renew", "--days", "2")
        assert renewed.returncode == 0, renewed.stderr
        # Each new connection shows the new ones: operators, a server that is started, clients to it, the
        # balancer to one that is to leave.
        operator.run("scale", "3", *operator.key, *operator.tls)
        assert "expert-server-2" in operator.run("status", *operator.key, *operator.tls)
        operator.run("drain", "expert-server-0", *operator.key, *operator.tls)
        wanted = len(texts) + 2
        up.until(lambda: len(texts) >= wanted)
    finally:
        over.set()
        thread.join()
    assert set(texts) == {expected.removesuffix("\n")}


def test_no_secret_is_printed(up: Any, operator: Operator, secrets_at: Path) -> None:
    for words in (("status", "--json"), ("history", *operator.tls)):
        operator.run(*words, *operator.key)
    up.signal(signal.SIGINT)
    assert up.process.wait(20) == 0
    shown = "".join([up.output, *operator.printed])
    logs = sorted((secrets_at / "logs").iterdir())
    assert len(logs) >= 5
    shown += "".join(path.read_text() for path in logs)
    assert "certificates" in shown
    secrets = [KEY]
    for key in (secrets_at / "tls").glob("*.key"):
        secrets += key.read_text().splitlines()[1:-1]
    assert len(secrets) > 10
    assert [secret for secret in secrets if secret in shown] == []
    up.home.assert_nothing_left()
