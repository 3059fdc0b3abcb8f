"""User mistakes: one line with the mistake and the remedy, exit code 2, nothing left."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

# A start whose checkpoint is wrong in a way that only transformers sees ends within that.
SOON_S = 40.0


@pytest.fixture
def model(checkpoint: Callable[..., Path], tmp_path: Path) -> Path:
    """A checkpoint that the test may damage."""
    return Path(shutil.copytree(checkpoint("qwen3_moe"), tmp_path / "model"))


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def refused(home: Any, done: subprocess.CompletedProcess[str], *named: str) -> None:
    """Check the form of a refusal."""
    assert done.returncode == 2, (done.stdout, done.stderr)
    (line,) = done.stderr.splitlines()
    assert line.startswith("eaas: error: ")
    for text in named:
        assert text in line
    assert "SERVING" not in done.stdout
    assert "endpoint" not in done.stdout
    home.assert_nothing_left(within_s=2.0)


def up(home: Any, model: object, *options: str) -> subprocess.CompletedProcess[str]:
    done: subprocess.CompletedProcess[str] = home.run(
        "up", "--model", str(model), "--port", "0", *options, timeout=SOON_S
    )
    return done


# -- the checkpoint ------------------------------------------------------------------------------------


def test_a_missing_path(home: Any) -> None:
    name = "Qwen/Qwen3-30B-A3B"
    refused(home, up(home, name), name, "give the local directory")


def test_a_damaged_checkpoint(home: Any, model: Path) -> None:
    """A truncated shard; `integration/test_refusals_at_start.py` has other damage."""
    os.truncate(min(model.glob("*.safetensors")), 1000)
    refused(home, up(home, model), str(model), "download the shard again")


def test_dense_model(home: Any, tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32}
    path = tmp_path / "dense"
    LlamaForCausalLM(
        LlamaConfig(num_hidden_layers=1, num_attention_heads=2, **sizes)
    ).save_pretrained(path)
    refused(home, up(home, path), str(path), "no layer with experts", "another engine")


# -- the options and settings --------------------------------------------------------------------------


def test_port_in_use(home: Any, model: Path, taken: int) -> None:
    done = home.run("up", "--model", str(model), "--port", str(taken), timeout=SOON_S)
    refused(home, done, str(taken), "--port")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--host", "192.0.2.1"), ("--host 192.0.2.1",)),
        (("--host", "0.0.0.0"), ("--host 0.0.0.0", "--api-key-file FILE", "--insecure")),
        (("--servers", "1", "--redundancy", "2"), ("--servers 2", "--redundancy 2")),
        (("--transport", "rdma"), ("--transport", "none of auto, shm, grpc, nixl")),
        (("--log-dir", __file__), (__file__, "--log-dir")),
        (("--config", "nowhere.yaml"), ("nowhere.yaml",)),
    ],
)
def test_a_wrong_option(
    home: Any, model: Path, options: tuple[str, ...], named: tuple[str, ...]
) -> None:
    refused(home, up(home, model, *options), *named)


def test_a_public_monitor_without_tls(home: Any) -> None:
    done = home.run("monitor", "--host", "0.0.0.0", timeout=SOON_S)
    refused(home, done, "--host 0.0.0.0", "--tls DIR", "eaas certs", "--insecure")


def test_wrong_cluster_yaml(home: Any, model: Path) -> None:
    file = model / "cluster.yaml"
    file.write_text("expert_server: {slots: 1}")
    refused(home, up(home, model, "--config", str(file)), str(file), "expert_server.slots")


@pytest.mark.parametrize(
    ("variable", "value", "named"),
    [
        ("EAAS_EXPERT_SERVER__SLOTS", "many", ("EAAS_EXPERT_SERVER__SLOTS",)),
        # The launcher prints the child's message.
        ("EAAS_MONITOR__LEASE_S", "0.5", ("monitor.heartbeat_s", "monitor.lease_s")),
    ],
)
def test_wrong_environment(
    home: Any, model: Path, variable: str, value: str, named: tuple[str, ...]
) -> None:
    home.environment[variable] = value
    refused(home, up(home, model), *named)


@pytest.mark.parametrize(
    ("variable", "known"),
    [
        ("EAAS_BALANCER__POLICY", "fractional"),
        ("EAAS_ATTENTION_CLIENT__SCHEDULER__STRATEGY", "fcfs"),
    ],
)
def test_an_unknown_name_is_refused_before_a_process_starts(
    home: Any, model: Path, variable: str, known: str
) -> None:
    home.environment[variable] = "nope"
    done = up(home, model)
    refused(home, done, "'nope'", known)
    assert done.stdout == ""


# -- the roles and the clients of a cluster that is not there -----------------------------------------


@pytest.mark.parametrize(
    ("role", "words"),
    [
        ("balancer", ()),
        pytest.param("expert-server", ("--model", "MODEL"), marks=pytest.mark.nightly),
        pytest.param("attention-client", ("--model", "MODEL"), marks=pytest.mark.nightly),
        pytest.param("frontend", ("--model", "MODEL"), marks=pytest.mark.nightly),
    ],
)
def test_no_monitor(home: Any, model: Path, taken: int, role: str, words: tuple[str, ...]) -> None:
    """The port is held by a program without gRPC. A role tries for 10 s."""
    address = f"127.0.0.1:{taken}"
    words = tuple(str(model) if word == "MODEL" else word for word in words)
    done = home.run(role, "--join", address, "--port", "0", *words, timeout=2 * SOON_S)
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert last.startswith("eaas: error: cannot register ")
    assert address in last
    assert "check the address" in last
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    home.assert_nothing_left(within_s=2.0)


@pytest.mark.parametrize(
    ("words", "endpoint"),
    [(("status",), "http://127.0.0.1:1"), (("generate", "Hello", "--json"), "nonsense")],
)
def test_no_cluster(home: Any, words: tuple[str, ...], endpoint: str) -> None:
    done = home.run(*words, "--endpoint", endpoint)
    refused(home, done, endpoint, "eaas up")
    assert done.stdout == ""


def test_another_server_at_the_endpoint(home: Any, tmp_path: Path) -> None:
    """It answers 404, for which httpx's error has two lines."""
    with subprocess.Popen(
        [sys.executable, "-u", "-m", "http.server", "0", "--bind", "127.0.0.1"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as server:
        assert server.stdout is not None
        port = server.stdout.readline().split("port ")[1].split()[0]
        try:
            done = home.run("status", "--endpoint", f"http://127.0.0.1:{port}")
        finally:
            server.kill()
    refused(home, done, "404")


def test_demo_model_does_not_overwrite(home: Any, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    refused(home, home.run("demo-model", str(tmp_path)), str(tmp_path), "another path")
    assert (tmp_path / "thesis.tex").read_text() == "years of work"
