"""`eaas up --engine vllm`, in the environment of `make setup-vllm`. The tests share a cluster, in order."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from browser import chromium, open_page
from vllm_python import NEEDS_VLLM, PYTHON, ROOT

START_S = 400.0

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.nightly,
    pytest.mark.timeout(900),
    NEEDS_VLLM,
]


@pytest.fixture(scope="module")
def up(start_up: Callable[..., Any]) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        running = start_up(ROOT / "examples" / "demo", "--engine", "vllm", python=str(PYTHON))
        running.wait_output("(Ctrl-C ends)", START_S)
        yield running
        running.end()


def group_of(up: Any) -> tuple[int, int, list[int]]:
    """Pids of `eaas vllm` and of vLLM's API server, and all of vLLM's processes."""
    processes = up.home.processes()
    (supervisor,) = [pid for pid, line in processes.items() if "-m eaas_cli vllm " in line]
    (server,) = [pid for pid, line in processes.items() if "vllm.entrypoints" in line]
    members = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and os.getpgid(int(entry.name)) == server:
                members.append(int(entry.name))
        except ProcessLookupError:
            continue
    return supervisor, server, members


def page_of(up: Any) -> str:
    """Address of the page, with the operator's token."""
    return str(up.wait_output(r"page: +(http://\S+/)"))


def lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def test_the_printed_curl_line_works(up: Any) -> None:
    (line,) = re.findall(r"^curl .*$", up.output, re.MULTILINE)
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60)
    document = json.loads(done.stdout)
    assert document["model"] == "demo"
    assert document["choices"][0]["message"]["content"]


def test_the_page_shows_the_cluster_and_chats(up: Any) -> None:
    with chromium() as browser, open_page(browser, page_of(up)) as watched:
        page = watched.page
        page.get_by_text("all is well").wait_for()
        assert watched.part("members").get_by_text("SERVING").count() == 7
        page.get_by_role("button", name="Kill expert-server-2", exact=True).wait_for()
        page.get_by_role("button", name="Send").click()
        page.wait_for_function("() => document.querySelector('#answer').innerText.length > 20")
        page.get_by_role("button", name="Send").click()  # enabled after the answer
        assert "The answer failed" not in watched.part("answer").inner_text()
        assert watched.complaints == []


def test_status_is_the_same_at_vllms_address_and_at_the_pages(up: Any) -> None:
    document = up.status()
    assert document["coverage"] == {"uncovered": [], "min_replicas": 2, "min_nodes": 1}
    roles = sorted(m["role"] for m in document["members"])
    assert roles == ["attention-client", "balancer", *["expert-server"] * 3, "frontend", "monitor"]
    assert {m["state"] for m in document["members"]} == {"SERVING"}
    assert up.member("vllm")["address"] == up.endpoint.removeprefix("http://")
    page = f"http://{up.member('frontend')['address']}"
    assert page_of(up).startswith(page)
    for endpoint in (up.endpoint, page):
        for words in (("status",), ("top", "--once"), ("generate", "Hello", "--max-tokens", "4")):
            done = up.home.run(*words, "--endpoint", endpoint)
            assert done.returncode == 0, done.stderr
            assert done.stdout.strip()


def test_the_endpoint_has_metrics_of_both_and_checks_hosts(up: Any) -> None:
    page = httpx.get(f"{up.endpoint}/metrics", timeout=20).text
    assert "\nvllm:generation_tokens_total{" in page
    assert "\neaas_layer_calls_total " in page
    assert "\neaas_expert_server_up{" in page
    refused = httpx.get(f"{up.endpoint}/v1/models", headers={"Host": "evil.example"})
    assert refused.status_code == 403
    assert httpx.get(f"{up.endpoint}/", timeout=60).status_code == 404
    passed = httpx.get(f"http://{up.member('frontend')['address']}/metrics", timeout=20).text
    assert "\nvllm:generation_tokens_total{" in passed
    assert "\neaas_expert_server_up{" in passed


def test_a_server_killed_during_an_answer_changes_no_text(up: Any) -> None:
    expected = up.stream()
    name = "expert-server-1"
    pid = up.member(name)["pid"]
    assert up.stream(after=20, then=lambda: os.kill(pid, signal.SIGKILL)) == expected
    up.until(lambda: up.member(name)["state"] == "DEAD")
    line = up.wait_output(rf"{name} \(pid {pid}\) ended; start it again with:\n  (.+)\n")
    returned = up.paste(line)
    threading.Thread(target=returned.wait, daemon=True).start()
    up.until(lambda: up.status()["coverage"]["min_replicas"] == 2, 60)
    assert up.stream() == expected


def test_scale_and_rebalance(up: Any) -> None:
    page = f"http://{up.member('frontend')['address']}"
    for endpoint, *words in (
        (up.endpoint, "scale", "4"),
        (page, "rebalance"),
        (page, "drain", "expert-server-3"),
    ):
        done = up.home.run(*words, "--endpoint", endpoint, timeout=120)
        assert done.returncode == 0, done.stderr
    assert up.status()["coverage"]["min_replicas"] == 2


def test_a_killed_supervisor_leaves_nothing_of_vllm_and_starts_again(up: Any) -> None:
    supervisor, _, members = group_of(up)
    assert len(members) >= 3
    os.kill(supervisor, signal.SIGKILL)
    up.until(lambda: not any(lives(pid) for pid in members), 30)
    up.wait_output(r"(vllm \(pid \d+\) serves again)", START_S)
    assert up.member("vllm")["state"] == "SERVING"


def test_a_killed_frontend_takes_no_stream_with_it_and_has_its_address_again(up: Any) -> None:
    page, expected = page_of(up), up.stream()
    pid = up.member("frontend")["pid"]
    assert up.stream(after=20, then=lambda: os.kill(pid, signal.SIGKILL)) == expected
    up.wait_output(r"(frontend \(pid \d+\) serves again)")
    assert httpx.get(page, follow_redirects=True).status_code == 200


def test_ctrl_c_leaves_nothing(up: Any) -> None:
    _, _, members = group_of(up)
    up.signal(signal.SIGINT)
    assert up.process.wait(40) == 0
    assert not any(lives(pid) for pid in members)
    up.home.assert_nothing_left()
