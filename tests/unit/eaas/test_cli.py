"""The command line is a public face: its options are frozen here, and asking for help is cheap."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer
from typer.testing import CliRunner

import eaas
from eaas.cli import app, placement
from eaas.cli.client import _unreachable
from eaas.errors import ConfigError
from eaas.local.process import ChildProcess

ROOT = Path(__file__).parents[3]
EXPERT_SERVER = {
    "--model": None,
    "--join": None,
    "--id": None,
    "--host": None,
    "--port": None,
    "--threads": None,
    "--kernel": None,
    "--quantization": None,
    "--slots": None,
    "--slot-tokens": None,
    "--tls": None,
    "--insecure": False,
    "--config": None,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "up": {
        "--model": None,
        "--servers": 3,
        "--redundancy": 2,
        "--transport": None,
        "--host": None,
        "--port": None,
        "--kernel": None,
        "--quantization": None,
        "--api-key-file": None,
        "--tls": None,
        "--insecure": False,
        "--config": None,
        "--log-dir": None,
    },
    "status": {"--endpoint": "http://127.0.0.1:8000", "--api-key-file": None, "--json": False},
    "generate": {
        "prompt": None,
        "--endpoint": "http://127.0.0.1:8000",
        "--max-tokens": 64,
        "--temperature": 0.0,
        "--api-key-file": None,
        "--json": False,
    },
    "scale": {
        "servers": None,
        "--endpoint": "http://127.0.0.1:8000",
        "--api-key-file": None,
        "--tls": None,
    },
    "drain": {
        "server": None,
        "--endpoint": "http://127.0.0.1:8000",
        "--api-key-file": None,
        "--tls": None,
    },
    "plan": {
        "--policy": None,
        "--more-servers": 0,
        "--without": None,
        "--redundancy": None,
        "--redundant-experts": None,
        "--endpoint": "http://127.0.0.1:8000",
        "--api-key-file": None,
        "--tls": None,
        "--json": False,
    },
    "rebalance": {
        "--policy": None,
        "--force": False,
        "--endpoint": "http://127.0.0.1:8000",
        "--api-key-file": None,
        "--tls": None,
        "--json": False,
    },
    "pin": {
        "layer": None,
        "expert": None,
        "server": None,
        "--endpoint": "http://127.0.0.1:8000",
        "--api-key-file": None,
        "--tls": None,
    },
    "unpin": {
        "layer": None,
        "expert": None,
        "server": None,
        "--endpoint": "http://127.0.0.1:8000",
        "--api-key-file": None,
        "--tls": None,
    },
    "history": {
        "--limit": 20,
        "--endpoint": "http://127.0.0.1:8000",
        "--api-key-file": None,
        "--tls": None,
        "--json": False,
    },
    "policy": {
        "name": None,
        "--knob": None,
        "--endpoint": "http://127.0.0.1:8000",
        "--api-key-file": None,
        "--tls": None,
        "--json": False,
    },
    "autoscale": {
        "--join": None,
        "--min-servers": None,
        "--max-servers": None,
        "--dry-run": False,
        "--tls": None,
        "--config": None,
    },
    "certs": {"directory": None, "--days": 30, "--san": None, "--renew": False},
    "demo-model": {
        "directory": None,
        "--arch": "qwen3_moe",
        "--layers": 4,
        "--hidden": 128,
        "--experts": 16,
        "--top-k": 4,
        "--seed": 0,
        "--dtype": "float32",
    },
    "bench serve": {
        "--model": None,
        "--servers": 3,
        "--redundancy": 2,
        "--transport": "shm",
        "--requests": 16,
        "--concurrency": 4,
        "--prompt-tokens": 32,
        "--max-tokens": 64,
        "--rounds": 3,
        "--baseline": "transformers",
        "--json": False,
    },
    "bench dispatch": {
        "--transport": None,
        "--hidden": "2048,7168",
        "--tokens": "1,8,64,512",
        "--rounds": 5,
        "--server": True,
        "--plot": None,
        "--json": False,
    },
    "bench monitor": {
        "--members": "100,1000,10000",
        "--watchers": "10,100,1000",
        "--per-connection": 1,
        "--loaders": 2,
        "--seconds": 10.0,
        "--json": False,
    },
    "bench overlap": {
        "--model": None,
        "--servers": 1,
        "--transport": "shm",
        "--latency": "0,2000,5000,10000",
        "--sequences": "8,32,128",
        "--prompt-tokens": 64,
        "--steps": 16,
        "--rounds": 3,
        "--json": False,
    },
    "bench join": {
        "--share-mb": 1000,
        "--source": None,
        "--tokens": 8,
        "--calls": 50,
        "--quiet": 10,
        "--rounds": 3,
        "--json": False,
    },
    "bench rebalance": {
        "--share-mb": 500,
        "--tokens": 8,
        "--calls": 100,
        "--quiet": 5,
        "--rounds": 5,
        "--json": False,
    },
    "bench experts": {
        "--shape": None,
        "--builtin": True,
        "--tokens": "1,8,64,512,2048",
        "--dtype": None,
        "--kernel": None,
        "--rounds": 5,
        "--threads": None,
        "--plot": None,
        "--json": False,
    },
    "bench select": {"--size": None, "--strategies": None, "--decisions": 2000, "--json": False},
    "simulate caps": {
        "--requests": 3000,
        "--seeds": "42,123,456,789",
        "--rates": "150,200,250,300",
        "--pattern": "both",
        "--strategies": None,
        "--routing": None,
        "--out": None,
        "--json": False,
    },
    "simulate policy": {
        "--strategy": None,
        "--loads": "0.5,0.6,0.7,0.8,0.9,0.95",
        "--overloads": "1.29,1.72,2.58",
        "--trace": None,
        "--requests": 6000,
        "--seeds": "1,2,3,4",
        "--predicted-pairs": 40,
        "--step-us": None,
        "--servers": 3,
        "--json": False,
    },
    "simulate fit": {"bench": None, "--json": False},
    "simulate replay": {"recording": None, "--strategy": None, "--json": False},
    "simulate validate": {
        "--model": None,
        "--strategies": None,
        "--trace": None,
        "--rounds": 4,
        "--requests": 80,
        "--load": 3.0,
        "--batch-size": 4,
        "--window-size": 16,
        "--prompt-tokens": 32,
        "--max-tokens": 16,
        "--servers": 2,
        "--redundancy": 1,
        "--seed": 1,
        "--config": None,
        "--json": False,
    },
    "bench predict": {
        "--model": None,
        "--prompts": None,
        "--requests": 32,
        "--prompt-tokens": 64,
        "--max-tokens": 32,
        "--threads": None,
        "--json": False,
    },
    "bench failover": {
        "--model": None,
        "--servers": 8,
        "--redundancy": 2,
        "--faults": 10,
        "--kind": "kill",
        "--streams": 4,
        "--max-tokens": 400,
        "--fixed-group": True,
        "--transport": "shm",
        "--seed": 1,
        "--plot": None,
        "--json": False,
    },
    "chaos run": {
        "--seed": 1,
        "--minutes": 1.0,
        "--faults": "",
        "--model": None,
        "--servers": 4,
        "--redundancy": 2,
        "--transport": "shm",
        "--rate": 4.0,
        "--max-tokens": 24,
        "--history": None,
        "--json": False,
    },
    "simulate autoscale": {
        "--trace": None,
        "--paper": False,
        "--fixed": "8,16,32",
        "--start": None,
        "--max-servers": None,
        "--server-tokens-per-s": None,
        "--token-ms": 50.0,
        "--prompt-tokens": 256,
        "--change-s": 10.0,
        "--config": None,
        "--json": False,
    },
    "bench policies": {"--size": None, "--policy": None, "--rounds": 9, "--json": False},
    "trace record": {
        "target": None,
        "--model": None,
        "--prompts": None,
        "--batch": 8,
        "--max-tokens": 32,
        "--temperature": 0.0,
        "--endpoint": None,
    },
    "trace convert": {"source": None, "target": None},
    "trace generate": {
        "target": None,
        "--regime": "skewed",
        "--iterations": 6144,
        "--layers": 58,
        "--experts": 256,
        "--tokens": 1024,
        "--top-k": 8,
        "--seed": 0,
    },
    "trace info": {"source": None, "--against": None, "--json": False},
    "trace compare": {
        "source": None,
        "--policy": None,
        "--servers": "64",
        "--interval": "256,1024",
        "--slots": None,
        "--planning": "0.4",
        "--knobs": None,
        "--plot": None,
        "--json": False,
    },
    "knobs train": {
        "traces": None,
        "--held-out": None,
        "--out": None,
        "--servers": 64,
        "--slots": None,
        "--interval": 256,
        "--epochs": 12,
        "--rate": 0.03,
        "--lifetime": 2,
        "--transit-weight": None,
        "--seed": 0,
        "--json": False,
    },
    "knobs info": {"file": None, "--json": False},
    "expert-server": EXPERT_SERVER,
    "attention-client": {
        "--model": None,
        "--join": None,
        "--id": None,
        "--host": None,
        "--port": None,
        "--transport": None,
        "--threads": None,
        "--api-key-file": None,
        "--tls": None,
        "--insecure": False,
        "--config": None,
    },
    "monitor": {
        "--host": None,
        "--port": None,
        "--stop-members-on-exit": None,
        "--store": None,
        "--data-dir": None,
        "--zookeeper-hosts": None,
        "--tls": None,
        "--insecure": False,
        "--config": None,
    },
    "balancer": {
        "--join": None,
        "--servers": None,
        "--redundancy": None,
        "--host": None,
        "--port": None,
        "--tls": None,
        "--insecure": False,
        "--config": None,
    },
}


def commands(group: Any, prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            found |= commands(command, f"{prefix}{name} ")
        else:
            found[prefix + name] = command
    return found


COMMANDS = commands(typer.main.get_command(app))


def test_every_command_is_frozen() -> None:
    assert COMMANDS.keys() == OPTIONS.keys()


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str) -> None:
    parameters = {p.opts[0]: p.default for p in COMMANDS[name].params}
    assert parameters == OPTIONS[name]


def test_version() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout.strip()) == (0, eaas.__version__)


def test_help_needs_neither_torch_nor_transformers() -> None:
    code = """
import contextlib, io, json, sys
from eaas.cli import app, placement
for words in json.load(sys.stdin):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            app([*words, "--help"])
        except SystemExit as end:
            assert not end.code, words
    assert "Usage" in out.getvalue(), words
import eaas.local
print(json.dumps(sorted({"torch", "transformers", "grpc"} & set(sys.modules))))
"""
    words = [[], *(name.split() for name in OPTIONS)]
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(words),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["up"], "--model"),
        (["up", "--model", "x", "--servers", "0"], "--servers"),
        (["up", "--model", "x", "--nonsense"], "--nonsense"),
        (["generate", "hi", "--max-tokens", "0"], "--max-tokens"),
        (["expert-server", "--model", "x"], "--join"),
        (["nonsense"], "nonsense"),
    ],
)
def test_a_wrong_call_names_the_option(arguments: list[str], named: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert named in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("knobs", "why"),
    [
        (["k"], "--knob k: give NAME=VALUE"),
        (["=1"], "--knob =1: give NAME=VALUE"),
        (["k=two"], "--knob k=two: give NAME=VALUE"),
        (["k=nan"], "--knob k=nan: give NAME=VALUE"),
        (["k=1", "k=2"], "--knob k is given twice"),
    ],
)
def test_a_knob_is_a_name_and_a_number(knobs: list[str], why: str) -> None:
    arguments = [word for knob in knobs for word in ("--knob", knob)]
    result = CliRunner().invoke(app, ["policy", "scalpel", *arguments])
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception).startswith(why)


def test_a_policy_is_set_with_its_knobs(monkeypatch: pytest.MonkeyPatch) -> None:
    class Balancer:
        def __enter__(self) -> Balancer:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def set_policy(self, name: str, knobs: dict[str, float]) -> str:
            assert (name, knobs) == ("scalpel", {"k": 1.5, "budget": 3.0})
            return "spread"

    monkeypatch.setattr(placement, "_balancer", lambda *_: Balancer())
    words = ["policy", "scalpel", "--knob", "k=1.5", "--knob", "budget=3"]
    assert CliRunner().invoke(app, words).stdout == "policy scalpel, before: spread\n"
    told = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)
    assert told == {"policy": "scalpel", "knobs": {"k": 1.5, "budget": 3.0}, "before": "spread"}


def test_the_reason_nobody_answers_is_one_line() -> None:
    response = httpx.Response(404, request=httpx.Request("GET", "http://x/eaas/v1/status"))
    with pytest.raises(httpx.HTTPStatusError) as caught:
        response.raise_for_status()
    assert "\n" in str(caught.value)
    message = _unreachable("http://x", caught.value)
    assert "\n" not in message
    assert "404" in message
    assert "ReadTimeout" in _unreachable("http://x", httpx.ReadTimeout(""))


def test_the_line_to_start_again_can_be_pasted(tmp_path: Path) -> None:
    child = ChildProcess(
        "probe", ["-c", "import sys; print(sys.argv[1:])", "it's"], tmp_path, module="this"
    )
    try:
        echoed = subprocess.run(
            ["bash", "-c", f"printf '%s\\n' {child.command}"], capture_output=True, text=True
        )
        assert echoed.stdout.splitlines()[-3:] == [*child.arguments]
    finally:
        assert child.reap(30)
