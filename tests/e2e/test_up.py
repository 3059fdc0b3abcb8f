"""`eaas up` in a terminal: what it prints works as pasted, and nothing outlives it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import random
import re
import select
import shutil
import signal
import socket
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
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from eaas.local.nursery import Nursery
from eaas.local.process import ChildProcess, wait_ready

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]

PROMPT = "Once upon a time"
LONG = 160


@pytest.fixture(scope="module")
def model(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A path that a shell would take apart."""
    path = tmp_path_factory.mktemp("models") / "it's a demo"
    shutil.copytree(checkpoint("qwen3_moe"), path)
    return path


@pytest.fixture(scope="module")
def up(model: Path, start_up: Callable[..., Any]) -> Iterator[Any]:
    running = start_up(model)
    running.wait_serving()
    yield running
    running.end()


@pytest.fixture(scope="module")
def eager_text(model: Path) -> str:
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(model)
    eager = AutoModelForCausalLM.from_pretrained(model, experts_implementation="eager").eval()
    ids_BT = tokenizer(PROMPT, return_tensors="pt").input_ids
    out_BT = eager.generate(ids_BT, max_new_tokens=LONG, do_sample=False)
    text: str = tokenizer.decode(out_BT[0, ids_BT.shape[1] :], skip_special_tokens=True)
    return text


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def until(wanted: Callable[[], Any], timeout_s: float = 60.0) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (found := wanted()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return found


def paste(up: Any, root: Path, line: str) -> subprocess.Popen[bytes]:
    """Run a printed line in another shell, in another directory; an uninstalled package is found."""
    return subprocess.Popen(
        ["bash", "-c", f"exec {line}"],
        cwd="/",
        env=up.home.environment | {"PYTHONPATH": str(root)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def stream(endpoint: str, after: int = 0, then: Callable[[], object] = lambda: None) -> str:
    """A long greedy completion, with something that happens after so many chunks of it."""
    body = {"prompt": PROMPT, "max_tokens": LONG, "temperature": 0, "stream": True}
    text, chunks = "", 0
    with httpx.stream("POST", f"{endpoint}/v1/completions", json=body, timeout=60) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            data = line.removeprefix("data: ")
            if not line.startswith("data: ") or data == "[DONE]":
                continue
            document = json.loads(data)
            if "error" in document:
                raise openai.APIError(str(document), request=response.request, body=document)
            text += "".join(choice["text"] for choice in document["choices"])
            chunks += 1
            if chunks == after:
                then()
    assert chunks > after
    return text


# -- a story in one cluster: each chapter leaves it as the next one needs it --------------------------


def test_the_printed_curl_line_works(up: Any) -> None:
    endpoint = up.endpoint
    (line,) = re.findall(r"^curl .*$", up.output, re.MULTILINE)
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["choices"][0]["message"]["content"]
    assert f"eaas status --endpoint {endpoint}" in up.output


def test_it_says_what_computes(up: Any) -> None:
    (kernel,) = re.findall(r"^kernel: +(.*)$", up.output, re.MULTILINE)
    assert re.fullmatch(r"\w+ \(float32(, \w+)?\)", kernel)


def test_status_json(up: Any) -> None:
    endpoint = up.endpoint
    # One document and nothing else.
    done = up.home.run("status", "--json", "--endpoint", endpoint)
    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    assert document.keys() == up.status().keys()
    assert {"epoch", "members", "coverage", "endpoint"} <= set(document)
    assert document["epoch"] == 1
    assert document["endpoint"].removesuffix("/v1") == endpoint
    assert document["coverage"] == {"uncovered": [], "min_replicas": 2}
    roles = sorted(m["role"] for m in document["members"])
    assert roles == ["attention-client", "balancer", *["expert-server"] * 3, "monitor"]
    living = up.home.processes()
    for m in document["members"]:
        assert set(m) == {
            *("id", "role", "pid", "host", "address"),
            *("state", "incarnation", "experts", "in_flight", "unreachable"),
        }
        assert (m["state"], m["incarnation"]) == ("SERVING", 1)
        # As of the last heartbeat, which may have been sent while the request before was answered.
        assert m["in_flight"] >= 0
        assert m["pid"] in living
        assert bool(m["experts"]) == (m["role"] == "expert-server")
    # 3 layers of 8 experts, each twice
    assert sum(m["experts"] for m in document["members"]) == 48


def test_commands_find_the_last_up_by_themselves(up: Any) -> None:
    home = up.home
    done = home.run("status", "--json")
    assert (done.returncode, json.loads(done.stdout)["endpoint"]) == (0, up.endpoint), done.stderr
    home.environment["EAAS_ENDPOINT"] = "http://127.0.0.1:1"
    try:
        done = home.run("status")
        assert done.returncode == 2
        # Where it has looked, and what else there is.
        assert "http://127.0.0.1:1: no cluster" in done.stderr
        assert f"`eaas up` is at {up.endpoint}" in done.stderr
        done = home.run("status", "--json", "--endpoint", up.endpoint)
        assert done.returncode == 0, done.stderr
    finally:
        del home.environment["EAAS_ENDPOINT"]
    for words in ((), ("--endpoint", up.endpoint), ("--join", up.member("monitor")["address"])):
        with subprocess.Popen(
            [sys.executable, "-m", "eaas", "autoscale", "--dry-run", *words],
            env=home.environment,
            stdout=subprocess.PIPE,
            text=True,
        ) as autoscaler:
            assert autoscaler.stdout is not None
            assert "servers" in autoscaler.stdout.readline()
            autoscaler.send_signal(signal.SIGINT)


def test_status_table(up: Any) -> None:
    done = up.home.run("status", "--endpoint", up.endpoint)
    assert done.returncode == 0
    assert done.stderr == ""
    for m in up.status()["members"]:
        (row,) = [line for line in done.stdout.splitlines() if line.split()[:1] == [m["id"]]]
        assert row.split()[1:4] == ["SERVING", str(m["pid"]), m["address"]]


def test_top_for_programs_and_in_a_pipe(up: Any) -> None:
    done = up.home.run("top", "--json", "--endpoint", up.endpoint)
    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    assert document["coverage"] == {"uncovered": [], "min_replicas": 2}
    assert {source["silent_s"] for source in document["sources"].values()} == {None}
    told = {m["id"]: m["state"] for m in document["members"]}
    assert told == {m["id"]: m["state"] for m in up.status()["members"]}
    done = up.home.run("top", "--endpoint", up.endpoint)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{up.endpoint}   epoch 1   experts: at least 2 live\n")
    assert "\x1b" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


@pytest.mark.parametrize("key", [b"q", b"\x03"], ids=["q", "Ctrl-C"])
def test_top_in_a_terminal(up: Any, key: bytes) -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    before = termios.tcgetattr(theirs)
    environment = up.home.environment | {"TERM": "xterm-256color"}
    command = [sys.executable, "-m", "eaas", "top", "--endpoint", up.endpoint]
    with subprocess.Popen(
        command,
        env=environment,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        # So that Ctrl-C is its terminal's to turn into a signal.
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    ) as process:
        try:
            shown = b""
            # From the second frame on there are rates: it goes on by itself.
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
            # What it said last may wait in the terminal.
            while select.select([ours], [], [], 0)[0]:
                shown += os.read(ours, 65536)
            assert process.returncode == 0
            assert b"Traceback" not in shown
            assert b"expert-server-0" in shown
            # The screen, the cursor and the keyboard are as they were.
            assert shown.count(b"\x1b[?1049h") == shown.count(b"\x1b[?1049l") == 1
            assert shown.count(b"\x1b[?25l") == shown.count(b"\x1b[?25h") == 1
            assert termios.tcgetattr(theirs) == before
        finally:
            process.kill()
            os.close(ours)
            os.close(theirs)


def test_generate(up: Any, eager_text: str) -> None:
    words = ("generate", PROMPT, "--max-tokens", str(LONG), "--endpoint", up.endpoint)
    printed = up.home.run(*words)
    assert (printed.returncode, printed.stderr) == (0, "")
    assert printed.stdout == eager_text + "\n"
    document = json.loads(up.home.run(*words, "--json").stdout)
    assert document["choices"][0]["text"] == eager_text


def test_a_page_of_another_name_is_refused(up: Any) -> None:
    port = up.endpoint.rpartition(":")[2]
    for path in ("/v1/models", "/eaas/v1/status", "/metrics", "/"):
        refused = httpx.get(f"{up.endpoint}{path}", headers={"Host": f"evil.example:{port}"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "host_not_allowed")
        # A forwarded port.
        answer = httpx.get(f"{up.endpoint}{path}", headers={"Host": "localhost:18080"}, timeout=60)
        assert answer.status_code == 200


def test_openai_client(up: Any) -> None:
    asked: dict[str, Any] = {
        "model": "it's a demo",
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 16,
        "temperature": 0,
    }
    with openai.OpenAI(base_url=f"{up.endpoint}/v1", api_key="none") as client:
        whole = client.chat.completions.create(**asked).choices[0].message.content
        with client.chat.completions.create(**asked, stream=True) as chunks:
            parts = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert whole
    assert "".join(parts) == whole
    assert len(parts) > 4


@pytest.mark.parametrize("way", ["printed line", "command line of the killed process"])
def test_kill_a_server_in_the_middle_of_an_answer_and_start_it_again(
    up: Any, root: Path, eager_text: str, way: str
) -> None:
    endpoint = up.endpoint
    name = "expert-server-1"
    before = up.member(name)
    pid = before["pid"]
    again = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:-1]
    cwd = os.readlink(f"/proc/{pid}/cwd")

    text = stream(endpoint, after=20, then=lambda: os.kill(pid, signal.SIGKILL))
    assert text == eager_text
    until(lambda: up.member(name)["state"] == "DEAD")
    assert up.status()["coverage"] == {"uncovered": [], "min_replicas": 1}

    if way == "printed line":
        line = up.wait_output(rf"{name} \(pid {pid}\) ended; start it again with:\n  (.+)\n")
        returned = paste(up, root, line)
    else:
        returned = subprocess.Popen(again, cwd=cwd, env=up.home.environment, start_new_session=True)
    threading.Thread(target=returned.wait, daemon=True).start()

    def back() -> bool:
        now = up.member(name)
        return now["state"] == "SERVING" and now["incarnation"] == before["incarnation"] + 1

    until(back)
    now = up.member(name)
    assert now["pid"] == returned.pid
    assert now["experts"] == before["experts"]
    until(lambda: up.status()["coverage"]["min_replicas"] == 2)
    assert stream(endpoint) == eager_text


def test_the_end_takes_a_server_that_was_started_by_hand(up: Any) -> None:
    by_hand = up.member("expert-server-1")["pid"]
    assert os.getpgid(by_hand) != os.getpgid(up.member("expert-server-2")["pid"])
    up.signal(signal.SIGINT)
    assert up.process.wait(10) == 0
    up.home.assert_nothing_left()


# -- another story: servers come and go, then the control plane goes ----------------------------------


@pytest.fixture(scope="module")
def two(model: Path, start_up: Callable[..., Any]) -> Iterator[Any]:
    running = start_up(model, "--servers", "2")
    running.wait_serving()
    yield running
    running.end()


def test_scale_and_drain(two: Any, model: Path, eager_text: str, nursery: Nursery) -> None:
    """Up, down, one by name: each command says what happens, and a long answer meets all of it."""
    up, endpoint = two, two.endpoint

    def run(*command: str) -> str:
        done = up.home.run(*command, "--endpoint", endpoint, timeout=120)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    def servers() -> set[str]:
        members = up.status()["members"]
        return {
            m["id"]
            for m in members
            if m["role"] == "expert-server" and m["state"] not in ("DEAD", "LEFT")
        }

    texts, over = [], threading.Event()

    def ask() -> None:
        while not over.wait(0.3):
            texts.append(stream(endpoint))

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        run("scale", "4")
        assert servers() == {f"expert-server-{i}" for i in range(4)}
        # It may drain between two looks at the status.
        assert run("scale", "3").endswith("expert-server-3: LEFT\n")
        assert servers() == {f"expert-server-{i}" for i in range(3)}
        run("drain", "expert-server-0")
        assert servers() == {"expert-server-1", "expert-server-2"}
        # The launcher counts what runs, whatever it is called and whoever started it.
        monitor = next(m for m in up.status()["members"] if m["role"] == "monitor")["address"]
        arguments = ["expert-server", "--id", "by-hand", "--join", monitor, "--model", str(model)]
        by_hand = ChildProcess("by-hand", arguments, None, nursery=nursery)
        try:
            wait_ready([by_hand], 60)
            run("scale", "4")
            assert servers() == {"by-hand", *(f"expert-server-{i}" for i in range(3))}
            run("drain", "by-hand")
            assert by_hand.reap(20)
        finally:
            by_hand.signal(signal.SIGKILL)
            by_hand.reap(10)
        assert servers() == {f"expert-server-{i}" for i in range(3)}
    finally:
        over.set()
        thread.join()
    assert set(texts) == {eager_text}
    assert up.status()["coverage"] == {"uncovered": [], "min_replicas": 2}
    refused = up.home.run("drain", "nobody", "--endpoint", endpoint)
    assert refused.returncode == 2
    assert refused.stderr.count("\n") == 1
    assert "'nobody' is no live expert server" in refused.stderr


def test_a_killed_fork_server_harms_no_process(two: Any, eager_text: str) -> None:
    """It is started again, and forks what the next test needs."""
    up = two
    before = {m["id"]: m["pid"] for m in up.status()["members"] if m["state"] == "SERVING"}
    (pid,) = [pid for pid, line in up.home.processes().items() if "nursery_process" in line]
    assert stream(up.endpoint, 5, lambda: os.kill(pid, signal.SIGKILL)) == eager_text
    up.wait_output(rf"fork-server \(pid {pid}\) was ended by SIGKILL; (the processes .* go on)")
    up.wait_output("fork-server .* (serves again)")
    members = up.status()["members"]
    assert before == {m["id"]: m["pid"] for m in members if m["state"] == "SERVING"}


def test_a_killed_attention_client_is_started_again(two: Any, eager_text: str) -> None:
    """At the same address, under the same name."""
    up = two
    before = up.member("attention-client")
    with pytest.raises(httpx.HTTPError):
        stream(up.endpoint, 5, lambda: os.kill(before["pid"], signal.SIGKILL))
    up.wait_output(rf"attention-client \(pid {before['pid']}\) was ended by SIGKILL; (.* lost);")
    pid = int(up.wait_output(r"attention-client \(pid (\d+)\) serves again"))
    now = up.member("attention-client")
    assert now == before | {"pid": pid, "incarnation": before["incarnation"] + 1, "in_flight": 0}
    assert stream(up.endpoint) == eager_text


@pytest.mark.parametrize("name", ["monitor", "balancer"])
def test_the_printed_line_brings_the_control_plane_back(
    two: Any, root: Path, eager_text: str, name: str
) -> None:
    """Everyone finds it and registers again, and it belongs to the cluster."""
    up = two
    before = up.member(name)
    serving = {m["id"] for m in up.status()["members"] if m["state"] == "SERVING"}
    os.kill(before["pid"], signal.SIGKILL)
    line = up.wait_output(rf"{name} \(pid {before['pid']}\) ended; start it again with:\n  (.+)\n")
    returned = paste(up, root, line)
    threading.Thread(target=returned.wait, daemon=True).start()

    def back() -> bool:
        members = [m for m in up.status()["members"] if m["state"] == "SERVING"]
        return {m["id"] for m in members} == serving and up.member(name)["pid"] == returned.pid

    until(back)
    if name == "monitor":
        assert up.member(name)["address"] == before["address"]
    up.wait_output(
        rf"{name} \(pid {returned.pid}\) was started by hand; (it ends with this cluster)"
    )
    assert stream(up.endpoint) == eager_text


def test_without_a_monitor(two: Any) -> None:
    """The control plane is off the data path."""
    up, endpoint = two, two.endpoint

    def view_age_s() -> float:
        metrics = httpx.get(f"{endpoint}/metrics").text
        return float(re.findall(r"^eaas_view_age_seconds (\S+)$", metrics, re.MULTILINE)[0])

    os.kill(up.member("monitor")["pid"], signal.SIGKILL)
    before_s = view_age_s()
    assert before_s < 3
    text = stream(endpoint)
    until(lambda: view_age_s() > before_s + 3)
    assert stream(endpoint) == text
    # It ends all the same, if the terminal closes, and so does the balancer that was started by hand.
    up.signal(signal.SIGHUP)
    up.process.wait(10)
    up.home.assert_nothing_left()


# -- the end -------------------------------------------------------------------------------------------


# Each signal and each moment, and the launcher's sudden end at both. SIGINT and SIGHUP end the idle clusters
# of the stories above; that each of the three that can be caught is heard, whatever goes on, is the subject
# of tests/unit/eaas/test_interrupt.py.
@pytest.mark.parametrize(
    ("name", "moment"),
    [
        ("SIGINT", "busy"),
        ("SIGTERM", "idle"),
        ("SIGHUP", "busy"),
        ("SIGKILL", "idle"),
        ("SIGKILL", "busy"),
    ],
)
def test_nothing_is_left(
    model: Path, start_up: Callable[..., Any], eager_text: str, name: str, moment: str
) -> None:
    up = start_up(model, "--servers", "1", "--redundancy", "1")
    up.wait_serving()
    endpoint = up.endpoint
    number = signal.Signals[name]

    def blow() -> None:
        if number is signal.SIGKILL:
            up.process.kill()
        else:
            up.signal(number)
            # A second one, from an impatient person, changes nothing.
            threading.Timer(0.3, os.killpg, (up.process.pid, number)).start()

    if moment == "idle":
        blow()
    else:
        # Cut off it may be: by an error, not as half an answer that looks whole.
        with contextlib.suppress(httpx.HTTPError, openai.APIError):
            assert stream(endpoint, after=5, then=blow) == eager_text
    code = up.process.wait(10)
    up.home.assert_nothing_left()
    assert is_free(int(endpoint.rpartition(":")[2]))
    assert code == (-signal.SIGKILL if number is signal.SIGKILL else 0)
    assert "Traceback" not in up.output


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["SIGTERM", "SIGKILL"])
def test_the_end_during_the_start(
    model: Path, start_up: Callable[..., Any], name: str, seed: int
) -> None:
    up = start_up(model, "--servers", "1", "--redundancy", "1")
    up.wait_output("(starting)")
    time.sleep(random.Random(f"{name} {seed}").uniform(0, 6))
    if name == "SIGTERM":
        up.signal(signal.SIGTERM)
    else:
        up.process.kill()
    up.process.wait(10)
    up.home.assert_nothing_left()
    assert "Traceback" not in up.output
