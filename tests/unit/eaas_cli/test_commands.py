"""The command line is a public interface: its options are frozen here, and `--help` is cheap."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer
from typer.testing import CliRunner

import eaas
from cli_options import OPTIONS
from eaas.errors import ClusterError, ConfigError, EaasError
from eaas_cli.commands import app
from eaas_cli.endpoint import check, unreachable_error
from eaas_cli.local.running_clusters import recorded

ROOT = Path(__file__).parents[3]


def commands(group: Any, prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            found |= commands(command, f"{prefix}{name} ")
        elif not command.hidden:
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
from eaas_cli.commands import app, placement
for words in json.load(sys.stdin):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            app([*words, "--help"])
        except SystemExit as end:
            assert not end.code, words
    assert "Usage" in out.getvalue(), words
import eaas_cli.local
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
        (["up", "--model", "x", "--servers", "0"], "--servers"),
        (["up", "--model", "x", "--nonsense"], "--nonsense"),
        (["generate", "hi", "--max-tokens", "0"], "--max-tokens"),
        (["expert-server", "--model", "x"], "--join"),
        (["nonsense"], "nonsense"),
        # Numbers that no message holds.
        (["scale", "--", "-1"], "'servers'"),
        (["scale", "--", "4294967296"], "'servers'"),
    ],
)
def test_a_wrong_call_names_the_option(arguments: list[str], named: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert named in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("former", "successor"),
    [
        ("bench dispatch --rounds 1", "now `python -m benchmarks.dispatch`, in a clone"),
        ("bench select", "gone; docs/performance.md"),
        ("serve DIR --port 1", "`eaas up DIR`"),
        ("ps -a", "`eaas status`"),
        ("simulate caps --seeds 1 --out=x", "gone: --json"),
        ("vllm --operator-page", "an option of the page's own process"),
    ],
)
def test_a_former_name_is_an_error_with_its_successor(former: str, successor: str) -> None:
    result = CliRunner().invoke(app, former.split())
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception).startswith(f"`eaas {former.split()[0]}")
    assert f" is {successor}" in str(result.exception)


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


def test_a_policy_is_set_with_its_knobs(balancers_answer: Callable[..., Any]) -> None:
    def set_policy(_client: object, name: str, knobs: dict[str, float]) -> str:
        assert (name, knobs) == ("scalpel", {"k": 1.5, "budget": 3.0})
        return "spread"

    words = ["policy", "scalpel", "--knob", "k=1.5", "--knob", "budget=3"]
    told = balancers_answer("set_policy", set_policy, *words).stdout
    assert told == "policy set to scalpel (was spread)\n"
    told = json.loads(balancers_answer("set_policy", set_policy, *words, "--json").stdout)
    assert told == {"policy": "scalpel", "knobs": {"k": 1.5, "budget": 3.0}, "before": "spread"}


@pytest.mark.parametrize("words", [[], ["status"], ["bench"], ["bench", "serve"], ["vllm"]])
def test_h_is_help(words: list[str]) -> None:
    short, long = (CliRunner().invoke(app, [*words, option]) for option in ("-h", "--help"))
    assert short.exit_code == 0
    assert short.stdout == long.stdout


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["up"], "no checkpoint: .* `eaas up DIR` or --model DIR"),
        (["up", "x", "--model", "y"], "x and --model y are two checkpoints: give one"),
        (["up", "--model", ""], "the model is empty: give the directory"),
        (["up", ""], "the model is empty: give the directory"),
        (["up", "x", "--log-dir", ""], "--log-dir is empty: give a directory"),
        (["up", "/absent"], "/absent does not exist"),
        (["up", ".", "--engine", "vllm", "--clients", "2"], "--clients 2: vLLM is the only client"),
        (["up", "/absent", "--model", "/absent"], "/absent does not exist"),
        (["balancer", "--join", "localhost"], "--join localhost: give HOST:PORT"),
        (["autoscale", "--join", "h:1,h"], "--join h:1,h: give HOST:PORT"),
    ],
)
def test_a_mistake_is_named_before_anything_starts(words: list[str], why: str) -> None:
    error = CliRunner().invoke(app, words).exception
    assert isinstance(error, EaasError)
    assert re.match(why, str(error)), error


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ({"json": {"error": {"message": "Show a key."}}}, "Show a key."),
        ({"json": ["no"]}, r"\['no'\]"),
        ({"text": "<html>a proxy's page</html>"}, "Forbidden"),
    ],
)
def test_a_refusal_is_one_error_from_any_sender(answer: dict[str, Any], why: str) -> None:
    with pytest.raises(ClusterError, match=rf"refused \(403\): {why}"):
        check(httpx.Response(403, **answer))


def test_an_unreachable_endpoint_is_one_line() -> None:
    response = httpx.Response(404, request=httpx.Request("GET", "http://x/eaas/v1/status"))
    message = unreachable_error(
        "http://x", httpx.HTTPStatusError("a\nb 404", request=response.request, response=response)
    )
    assert "\n" not in message
    assert "404" in message
    assert message.count("http://x") == 1
    assert "ReadTimeout" in unreachable_error("http://x", httpx.ReadTimeout(""))


def test_the_address_of_an_own_cluster_is_named_once() -> None:
    timeout = httpx.ReadTimeout("")
    with recorded("http://127.0.0.1:1", "", "demo"):
        told = "http://localhost:1/v1: your `eaas up` there does not answer (ReadTimeout)"
        assert unreachable_error("http://localhost:1/v1", timeout) == told
        elsewhere = unreachable_error("http://127.0.0.1:2", timeout)
    assert elsewhere.endswith("your `eaas up` serves at http://127.0.0.1:1 (demo)")


def test_an_answer_keeps_its_separators(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM does not escape them."""
    text = "a\u0085b\u2028c"
    event = json.dumps({"choices": [{"text": text}]}, ensure_ascii=False)
    body = f"data: {event}\n\ndata: [DONE]\n\n".encode()
    transport = httpx.MockTransport(lambda request: httpx.Response(200, content=body))
    plain = httpx.Client
    monkeypatch.setattr(httpx, "Client", lambda **_: plain(transport=transport))
    answer = CliRunner().invoke(app, ["generate", "x", "--endpoint", "http://127.0.0.1:9/v1"])
    assert (answer.exit_code, answer.stdout) == (0, f"{text}\n")
