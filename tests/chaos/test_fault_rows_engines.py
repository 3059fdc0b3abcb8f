"""Rows 44 to 55 of the fault contract: engines that die, stop, leave or are cut off. Each quotes its row.

The engines are real ones, in processes of their own. What an answer must be then: see `moved_answers`.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from eaas_cli.demo_model import write_demo_model
from eaas_cli.local.fork_server import ForkServer
from model_engines import ModelEngines
from moved_answers import MovedAnswers, usage_of
from network_faults import Proxy

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]

CHAT = "/v1/chat/completions"
ASK: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "Tell me about rivers, please."}],
    "temperature": 0,
    "max_tokens": 64,
    "stream": True,
    "stream_options": {"include_usage": True},
}
# An answer that still runs when the test does something to an engine, or starts one.
LONG, LONGEST = ASK | {"max_tokens": 300}, ASK | {"max_tokens": 900}
# A random model ends it soon. Its letters are of several bytes, and tokens.
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"town": {"enum": ["Łódź 🙂", "Århus 🌊"]}},
    "required": ["town"],
    "additionalProperties": False,
}
JSON = ASK | {
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
    "max_tokens": 150,
}
FUNCTION = {"name": "warmth", "parameters": SCHEMA}
TOOL = ASK | {
    "tools": [{"type": "function", "function": FUNCTION}],
    "tool_choice": "required",
    "max_tokens": 150,
}


@pytest.fixture(scope="module")
def engines(fork_server: ForkServer) -> Iterator[ModelEngines]:
    with ModelEngines(fork_server) as engines:
        yield engines


@pytest.fixture
def moved(checkpoint: Callable[..., Path], engines: ModelEngines) -> Iterator[MovedAnswers]:
    with MovedAnswers(checkpoint(), engines) as moved:
        yield moved


def tokens_of(moved: MovedAnswers, body: dict[str, Any]) -> list[int]:
    """The answer of one engine, undisturbed."""
    moved.serve(-1)
    _, (sequence,) = moved.ask(CHAT, body)
    return sequence.tokens


def check_dies(moved: MovedAnswers, body: dict[str, Any], *at: int) -> None:
    """Engines die at these tokens of an answer, one after another; the last one lives."""
    answer, (sequence,) = moved.ask_dying(CHAT, body, *at)
    assert usage_of(answer) == len(sequence.tokens)
    assert sequence.moved_at == [sum(at[: i + 1]) for i in range(len(at)) if at[i] > 0]


def test_row_44_an_engine_killed_in_prefill(moved: MovedAnswers) -> None:
    """Row 44: an engine killed in prefill: another one begins the request; its user notices nothing."""
    check_dies(moved, ASK, 0)


@pytest.mark.parametrize("at", [1, 2, 31, 62])
def test_row_45_an_engine_killed_at_a_token(moved: MovedAnswers, at: int) -> None:
    """Row 45: an engine killed at each token of an answer: nothing that was sent changes, repeats or is
    missing; the rest is what the next engine, alone, says from there, bit for bit; usage counts once.
    """
    check_dies(moved, ASK, at)


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_row_45_an_engine_killed_at_each_token(
    checkpoint: Callable[..., Path], engines: ModelEngines, dtype: str
) -> None:
    """Row 45, at each of 64 tokens."""
    with MovedAnswers(checkpoint(dtype=dtype), engines) as moved:
        assert len(tokens_of(moved, ASK)) == 64
        for at in range(64):
            check_dies(moved, ASK, at)


@pytest.mark.parametrize("places", [1, pytest.param(4, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("where", ["a tool call", "a JSON string", "a character"])
def test_row_46_an_engine_killed_in_the_middle_of(
    moved: MovedAnswers, where: str, places: int
) -> None:
    """Row 46: an engine killed in the middle of a tool call, of a JSON string, of a UTF-8 character: the
    parts fit together.
    """
    body = TOOL if where == "a tool call" else JSON
    tokens = tokens_of(moved, body)
    texts = [moved.files.tokenizer.decode(tokens[:at]) for at in range(len(tokens))]
    begin = '"town"'
    inside = [at for at, text in enumerate(texts) if begin in text.replace(" ", "")[:-2]]
    if where == "a character":
        inside = [at for at in inside if texts[at].endswith("\ufffd")]
    for place in range(places):
        check_dies(moved, body, inside[len(inside) * (2 * place + 1) // (2 * places)])


def test_row_47_an_engine_killed_before_it_delivers_the_last_token(moved: MovedAnswers) -> None:
    """Row 47: an engine killed between the last token and its delivery: the next one says it."""
    check_dies(moved, ASK, len(tokens_of(moved, ASK)) - 1)
    check_dies(moved, JSON, len(tokens_of(moved, JSON)) - 1)


def test_row_48_all_engines_killed_and_one_restarted(moved: MovedAnswers) -> None:
    """Row 48: all engines killed and one restarted: requests wait for it, 60 s at most, and go on."""
    moved.serve(10, 5)  # the second one dies after five tokens more
    timer = threading.Timer(2.0, moved.join)
    timer.start()
    answer, sequences = moved.ask(CHAT, ASK)
    timer.join()
    assert len(sequences[0].moved_at) >= 2
    assert answer == moved.ask_again(CHAT, ASK, sequences)
    moved.check_moved(sequences)


def test_row_49_an_engine_that_is_stopped_and_continues(moved: MovedAnswers) -> None:
    """Row 49: an engine stopped (SIGSTOP) and later continued: its requests move within 3.5 s; what it still
    says is dropped; it is used again.
    """
    first, second = moved.serve(-1, -1)
    answer, sequences = moved.ask(CHAT, LONG, 3, lambda: first.signal(signal.SIGSTOP))
    assert set(moved.moves) == {"suspect"}
    assert answer == moved.ask_again(CHAT, LONG, sequences)
    moved.check_moved(sequences)
    second.signal(signal.SIGSTOP)
    first.signal(signal.SIGCONT)
    _, again = moved.ask(CHAT, ASK)
    assert set(again[0].engines) == {sequences[0].engines[0]}


def test_row_50_an_engine_that_is_drained(moved: MovedAnswers) -> None:
    """Row 50: an engine drained: its requests move at once, and it gets no new ones."""
    first, _ = moved.serve(-1, -1)
    answer, sequences = moved.ask(CHAT, LONG, 3, lambda: first.signal(signal.SIGTERM))
    assert "draining" in moved.moves
    assert answer == moved.ask_again(CHAT, LONG, sequences)
    moved.check_moved(sequences)
    _, again = moved.ask(CHAT, ASK)
    assert set(again[0].engines) == {sequences[0].engines[-1]}


def test_row_51_two_engines_killed_in_turn(moved: MovedAnswers) -> None:
    """Row 51: two engines killed in turn under one answer: a third one ends it."""
    check_dies(moved, ASK, 20, 13)


def test_row_52_a_request_that_kills_its_engine(moved: MovedAnswers) -> None:
    """Row 52: a request that kills its engine: after two deaths it ends with 503 and `engines_died`; it meets
    no third engine.
    """
    engines = moved.serve(0, 0, -1)
    status, error = moved.refused(CHAT, ASK | {"stream": False, "stream_options": None})
    assert (status, error["code"]) == (503, "engines_died")
    assert engines[-1].is_alive()
    assert moved.ask(CHAT, ASK)[1][0].tokens


@pytest.mark.parametrize("up", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_row_54_an_engine_cut_off_from_the_frontend(
    moved: MovedAnswers, cleanup: ExitStack, up: bool
) -> None:
    """Row 54: an engine cut off from the frontend but not from the monitor: its requests move; it is used
    again once the cut is over.
    """
    proxies: list[Proxy] = []

    def through(address: str) -> str:
        proxies.append(Proxy(address))
        cleanup.callback(proxies[0].close)
        return proxies[0].address

    moved.serve()
    moved.join(through=through)
    other = moved.join()
    answer, sequences = moved.ask(CHAT, LONG, 3, lambda: proxies[0].cut(up=up, down=True))
    assert set(moved.moves) == {"suspect"}
    assert answer == moved.ask_again(CHAT, LONG, sequences)
    moved.check_moved(sequences)
    proxies[0].heal()
    other.signal(signal.SIGKILL)
    _, again = moved.ask(CHAT, ASK)
    assert set(again[0].engines) == {sequences[0].engines[0]}


def test_row_55_a_rolling_update_to_another_checkpoint(moved: MovedAnswers, tmp_path: Path) -> None:
    """Row 55: a rolling update to another checkpoint: streams of the old one end on the old one."""
    sizes: dict[str, Any] = {"layers": 3, "hidden": 64, "experts": 8, "top_k": 2}
    write_demo_model(tmp_path / "other", dtype="float32", **sizes, seed=2)
    (old,) = moved.serve(-1)

    def update() -> None:
        moved.join(model=tmp_path / "other")
        old.signal(signal.SIGTERM)

    _, (begun,) = moved.ask(CHAT, LONGEST, 3, update)
    assert len(begun.tokens) == LONGEST["max_tokens"]
    assert len(set(begun.engines)) == 1
    assert not moved.moves
    time.sleep(0.2)
    _, (fresh,) = moved.ask(CHAT, ASK)
    assert set(fresh.engines).isdisjoint(begun.engines)
    assert fresh.tokens != begun.tokens[: len(fresh.tokens)]
