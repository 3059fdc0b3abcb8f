"""`eaas up`: printed lines, status, top, generate, a killed server. The tests share a cluster, in order."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from eaas_cli.local.running_clusters import recorded

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def up(
    shell_model: Path, start_up: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    """The checkpoint is a snapshot in a cache of huggingface_hub, at a path that a shell must quote."""
    repository = tmp_path_factory.mktemp("hub") / "it's a hub" / "models--org--demo"
    shutil.copytree(shell_model, repository / "snapshots" / "0123abcd")
    running = start_up(repository)
    running.wait_serving()
    yield running
    running.end()


def test_the_printed_curl_line_works(up: Any) -> None:
    endpoint = up.endpoint
    (line,) = re.findall(r"^curl .*$", up.output, re.MULTILINE)
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["choices"][0]["message"]["content"]
    assert answer["model"] == "org/demo"
    models = httpx.get(f"{endpoint}/v1/models", timeout=60).json()["data"]
    assert [model["id"] for model in models] == ["org/demo"]
    assert f"eaas status --endpoint {endpoint}" in up.output


def test_the_kernel_is_printed(up: Any) -> None:
    (kernel,) = re.findall(r"^kernel: +(.*)$", up.output, re.MULTILINE)
    assert re.fullmatch(r"\w+ \(float32(, \w+)?\)", kernel)


def test_status_json(up: Any) -> None:
    endpoint = up.endpoint
    done = up.home.run("status", "--json", "--endpoint", endpoint)
    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    assert document.keys() == up.status().keys()
    assert {"epoch", "members", "coverage", "endpoint"} <= set(document)
    assert document["epoch"] == 1
    assert document["endpoint"].removesuffix("/v1") == endpoint
    assert document["coverage"] == {"uncovered": [], "min_replicas": 2, "min_nodes": 1}
    roles = sorted(m["role"] for m in document["members"])
    assert roles == ["attention-client", "balancer", *["expert-server"] * 3, "frontend", "monitor"]
    living = up.home.processes()
    for m in document["members"]:
        assert set(m) == {
            *("id", "role", "pid", "host", "address"),
            *("state", "incarnation", "experts", "in_flight", "unreachable"),
        }
        assert (m["state"], m["incarnation"]) == ("SERVING", 1)
        # From the last heartbeat, which may have been sent during an earlier request.
        assert m["in_flight"] >= 0
        assert m["pid"] in living
        assert bool(m["experts"]) == (m["role"] == "expert-server")
    # 3 layers of 8 experts, each twice
    assert sum(m["experts"] for m in document["members"]) == 48


def test_commands_name_their_cluster_and_do_not_guess(up: Any) -> None:
    home = up.home
    # A second cluster of this user. Other tests may run more.
    with recorded("http://127.0.0.1:1", "", "second"):
        for words in (("scale", "2"), ("down",)):
            done = home.run(*words)
            assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
            for named in (up.endpoint, "http://127.0.0.1:1 (second)", "EAAS_ENDPOINT"):
                assert named in done.stderr
    done = home.run("scale", "3", "--endpoint", up.endpoint.removeprefix("http://"))
    assert (done.returncode, done.stdout) == (0, "nothing to do: the cluster has 3 servers\n")
    assert done.stderr.startswith(f"cluster: {up.endpoint} (")
    home.environment["EAAS_ENDPOINT"] = "http://127.0.0.1:1"
    try:
        done = home.run("status")
        assert done.returncode == 2
        # The error names the endpoint that was tried, and the running one.
        assert "http://127.0.0.1:1: no cluster" in done.stderr
        assert up.endpoint in done.stderr
        done = home.run("status", "--json", "--endpoint", up.endpoint)
        assert done.returncode == 0, done.stderr
    finally:
        del home.environment["EAAS_ENDPOINT"]
    for words in (("--endpoint", up.endpoint), ("--join", up.member("monitor")["address"])):
        with subprocess.Popen(
            [sys.executable, "-m", "eaas_cli", "autoscale", "--dry-run", *words],
            env=home.environment,
            stdout=subprocess.PIPE,
            text=True,
        ) as autoscaler:
            assert autoscaler.stdout is not None
            assert "servers" in autoscaler.stdout.readline()
            autoscaler.send_signal(signal.SIGINT)


def test_top_as_json_and_in_a_pipe(up: Any) -> None:
    done = up.home.run("top", "--json", "--endpoint", up.endpoint)
    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    assert document["coverage"] == {"uncovered": [], "min_replicas": 2, "min_nodes": 1}
    assert {source["silent_s"] for source in document["sources"].values()} == {None}
    shown = {m["id"]: m["state"] for m in document["members"]}
    assert shown == {m["id"]: m["state"] for m in up.status()["members"]}
    done = up.home.run("top", "--endpoint", up.endpoint)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(
        f"{up.endpoint}   epoch 1   experts: at least 2 live, on 1 node\n"
    )
    assert "\x1b" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


@pytest.mark.parametrize(
    "key", [b"q", pytest.param(b"\x03", marks=pytest.mark.nightly)], ids=["q", "Ctrl-C"]
)
def test_top_in_a_terminal(up: Any, key: bytes) -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    before = termios.tcgetattr(theirs)
    environment = up.home.environment | {"TERM": "xterm-256color"}
    command = [sys.executable, "-m", "eaas_cli", "top", "--endpoint", up.endpoint]
    with subprocess.Popen(
        command,
        env=environment,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        # Its own terminal turns Ctrl-C into a signal.
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    ) as process:
        try:
            shown = b""
            # Several frames: it updates by itself.
            while shown.count(b"tokens/s") < 3:
                ready, _, _ = select.select([ours], [], [], 60)
                assert ready, shown.decode(errors="replace")
                shown += os.read(ours, 65536)
            os.write(ours, key)
            deadline = time.monotonic() + 20
            while process.poll() is None:
                assert time.monotonic() < deadline
                if select.select([ours], [], [], 0.1)[0]:
                    shown += os.read(ours, 65536)
            # Read the rest of the terminal's buffer.
            while select.select([ours], [], [], 0)[0]:
                shown += os.read(ours, 65536)
            assert process.returncode == 0
            assert b"Traceback" not in shown
            assert b"expert-server-0" in shown
            # Screen, cursor and keyboard are restored.
            assert shown.count(b"\x1b[?1049h") == shown.count(b"\x1b[?1049l") == 1
            assert shown.count(b"\x1b[?25l") == shown.count(b"\x1b[?25h") == 1
            assert termios.tcgetattr(theirs) == before
        finally:
            process.kill()
            os.close(ours)
            os.close(theirs)


def test_generate(up: Any, prompt: tuple[str, int], eager_text: str) -> None:
    text, tokens = prompt
    words = ("generate", text, "--max-tokens", str(tokens), "--endpoint", up.endpoint)
    printed = up.home.run(*words)
    assert printed.returncode == 0
    assert printed.stderr == f"cluster: {up.endpoint} (org/demo)\n"
    assert printed.stdout == eager_text + "\n"
    document = json.loads(up.home.run(*words, "--json").stdout)
    assert document["choices"][0]["text"] == eager_text


def test_a_request_for_another_host_is_refused(up: Any) -> None:
    port = up.endpoint.rpartition(":")[2]
    for path in ("/v1/models", "/eaas/v1/status", "/metrics", "/"):
        refused = httpx.get(f"{up.endpoint}{path}", headers={"Host": f"evil.example:{port}"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "host_not_allowed")
        # A forwarded port.
        answer = httpx.get(f"{up.endpoint}{path}", headers={"Host": "localhost:18080"}, timeout=60)
        assert answer.status_code == 200


@pytest.mark.parametrize(
    "way",
    [
        "printed line",
        pytest.param("command line of the killed process", marks=pytest.mark.nightly),
    ],
)
def test_a_server_killed_during_an_answer_is_replaced_and_restarted(
    up: Any, eager_text: str, way: str
) -> None:
    name = "expert-server-1"
    before = up.member(name)
    pid = before["pid"]
    again = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:-1]
    cwd = os.readlink(f"/proc/{pid}/cwd")

    text = up.stream(after=20, then=lambda: os.kill(pid, signal.SIGKILL))
    assert text == eager_text
    up.until(lambda: up.member(name)["state"] == "DEAD")
    assert up.status()["coverage"] == {"uncovered": [], "min_replicas": 1, "min_nodes": 1}

    if way == "printed line":
        line = up.wait_output(rf"{name} \(pid {pid}\) ended; start it again with:\n  (.+)\n")
        returned = up.paste(line)
    else:
        returned = subprocess.Popen(again, cwd=cwd, env=up.home.environment, start_new_session=True)
    threading.Thread(target=returned.wait, daemon=True).start()

    def back() -> bool:
        now = up.member(name)
        return now["state"] == "SERVING" and now["incarnation"] == before["incarnation"] + 1

    up.until(back)
    now = up.member(name)
    assert now["pid"] == returned.pid
    assert now["experts"] == before["experts"]
    up.until(lambda: up.status()["coverage"]["min_replicas"] == 2)
    assert up.stream() == eager_text


def test_the_end_stops_a_server_started_by_hand(up: Any, eager_text: str) -> None:
    """During an answer, which only an error may cut off; a second signal changes nothing."""
    by_hand = up.member("expert-server-1")["pid"]
    assert os.getpgid(by_hand) != os.getpgid(up.member("expert-server-2")["pid"])

    def end() -> None:
        up.signal(signal.SIGTERM)
        threading.Timer(0.3, os.killpg, (up.process.pid, signal.SIGTERM)).start()

    with contextlib.suppress(httpx.HTTPError, openai.APIError):
        assert up.stream(after=5, then=end) == eager_text
    assert up.process.wait(10) == 0
    up.home.assert_nothing_left()
    assert "Traceback" not in up.output
