"""Thread and worker read bodies in the same way; the worker starts and ends on demand."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from eaas.generation.errors import ApiError
from eaas_cli.demo_model.tokenizer import build_tokenizer
from frontend.prompts import pool as pool_module
from frontend.prompts.bodies import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from frontend.prompts.pool import PromptPool
from frontend.prompts.reader import ModelLimits, PromptReader

LIMITS = ModelLimits(max_model_len=60_000, vocabulary=1000)
PATIENCE_S = 60.0
WORKER = "frontend.prompts.pool"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"x": {"type": "string"}}}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": "y"}'}}
PADDING = {"metadata": "m" * 70_000}  # for the worker
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}"
    "{% for c in m.tool_calls or [] %}<{{ c.function.name }}:{{ c.function.arguments.x }}>{% endfor %}"
    "{% if m.content == 'refuse' %}{{ raise_exception('no such turn') }}{% endif %}"
    "{% endfor %}{{ (tools or []) | tojson }}{{ mood }}{{ bos_token }}"
)
BODIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "text": (CompletionRequest, {"prompt": "the quick brown fox", "max_tokens": 7, "top_p": 0.5}),
    "unicode": (CompletionRequest, {"prompt": "ü\u0000\U0001f600 <s>", "stop": ["a", "b"]}),
    "ids": (CompletionRequest, {"prompt": [[5, 999, 0]], "stream": True, "temperature": 1}),
    "prompts": (
        CompletionRequest,
        {"prompt": ["the quick", [5, 999], "fox"], "n": 2, "seed": 3, "echo": True, "logprobs": 2},
    ),
    "settings": (
        CompletionRequest,
        {
            "prompt": [[1], [2, 3]],
            "logit_bias": {"999": -3},
            "stop_token_ids": [7],
            "min_p": 0.1,
            "presence_penalty": 1,
            "frequency_penalty": 0.5,
            "repetition_penalty": 1.2,
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
        },
    ),
    "wrong bias": (CompletionRequest, {"prompt": "x", "logit_bias": {"1000": 1}}),
    "wrong stop": (CompletionRequest, {"prompt": "x", "stop_token_ids": [1000]}),
    "one of several is empty": (CompletionRequest, {"prompt": ["x", ""]}),
    "continued": (
        ChatRequest,
        {
            "messages": [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "Once upon"},
            ],
            "continue_final_message": True,
            "logprobs": True,
            "top_logprobs": 3,
        },
    ),
    "chat": (
        ChatRequest,
        {
            "messages": [
                {"role": "developer", "content": [{"type": "text", "text": t} for t in "ab"]},
                {"role": "assistant", "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "1", "content": "done"},
                {"role": "user", "content": "hi", "name": "me"},
            ],
            "tools": [TOOL],
            "chat_template_kwargs": {"mood": "glad"},
            "max_completion_tokens": 3,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "object"}, "strict": True},
            },
            "tool_choice": {"type": "function", "function": {"name": TOOL["function"]["name"]}},
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    ),
    "tokenize": (TokenizeRequest, {"prompt": "the " * 9000, "return_token_strs": True}),
    "tokenize a chat": (
        TokenizeRequest,
        {
            "messages": [{"role": "user", "content": "hi"}],
            "tools": [TOOL],
            "add_generation_prompt": False,
            "chat_template_kwargs": {"mood": "sad"},
        },
    ),
    "tokenize nothing": (TokenizeRequest, {}),
    "detokenize": (DetokenizeRequest, {"tokens": [5, 99, 5]}),
    "detokenize a wrong token": (DetokenizeRequest, {"tokens": [5, 1000]}),
    "no tokens": (CompletionRequest, {"prompt": ""}),
    "wrong token": (CompletionRequest, {"prompt": [1000]}),
    "too many tokens": (CompletionRequest, {"prompt": [1] * 60_000}),
    "too long": (CompletionRequest, {"prompt": "x" * 1_000_000}),
    "unknown field": (CompletionRequest, {"prompt": "x", "y" * 5000: 1}),
    "refused by the template": (ChatRequest, {"messages": [{"role": "user", "content": "refuse"}]}),
    "reserved": (
        ChatRequest,
        {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"tokenize": 1}},
    ),
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    tokenizer = build_tokenizer(600, 4096)
    directory = str(tmp_path_factory.mktemp("tokenizer"))
    tokenizer.save_pretrained(directory)
    tokenizer.name_or_path, tokenizer.chat_template = directory, TEMPLATE
    return tokenizer


@pytest.fixture
def use(tokenizer: Any) -> Callable[..., Any]:
    """Runs a coroutine function with a new pool."""

    def use(function: Callable[[PromptPool], Coroutine[Any, Any, Any]]) -> Any:
        async def whole() -> Any:
            pool = PromptPool(tokenizer, LIMITS)
            try:
                return await function(pool)
            finally:
                pool.close()

        return asyncio.run(asyncio.wait_for(whole(), PATIENCE_S))

    return use


def outcome(read: Any) -> Any:
    """The result of a read, in a form that can be compared."""
    if isinstance(read, ApiError):
        return read.status, read.body()
    request, tokens = read
    request.found["ignored"] = [name for name in request.ignored if name not in PADDING]
    return request.settings(), request.found, tokens


def worker() -> psutil.Process | None:
    """The worker's process; None: it does not run."""
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if WORKER in child.cmdline():
                return child
    return None


def running() -> psutil.Process:
    found = worker()
    assert found is not None
    return found


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.02)


@pytest.fixture
def large_stack() -> Iterator[None]:
    """As after `ulimit -s`: each thread that the worker started would take as much of its address space."""
    before = _, hard = resource.getrlimit(resource.RLIMIT_STACK)
    large = 4_000_000 << 10 if hard == resource.RLIM_INFINITY else hard
    resource.setrlimit(resource.RLIMIT_STACK, (large, hard))
    yield
    resource.setrlimit(resource.RLIMIT_STACK, before)


@pytest.mark.usefixtures("large_stack")
def test_the_worker_reads_like_a_thread_and_has_one(
    tokenizer: Any, use: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "8")
    reader = PromptReader(tokenizer, LIMITS)

    async def both(pool: PromptPool) -> list[tuple[str, Any, Any]]:
        compared = []
        for name, (cls, fields) in BODIES.items():
            body = json.dumps(fields).encode()
            padded = json.dumps(fields | PADDING).encode()
            here, there = [
                outcome(read)
                for read in await asyncio.gather(
                    asyncio.to_thread(reader.read, cls, body),
                    pool.read(cls, padded),
                    return_exceptions=True,
                )
            ]
            compared.append((name, here, there))
        files = {Path(each.path).name for each in running().memory_maps()}
        # torch would take seconds to start and hundreds of megabytes.
        assert not {name for name in files if name.startswith("libtorch")}
        assert running().num_threads() == 1
        return compared

    refused = 0
    for name, here, there in use(both):
        assert there == here, name
        refused += here[0] == 400
    assert refused == 11


def test_a_worker_that_is_idle_dies_or_hangs_fails_only_its_request(
    use: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    body = json.dumps({"prompt": "x"} | PADDING).encode()

    async def read(pool: PromptPool) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(pool_module, "_IDLE_S", 0.1)
            await pool.read(CompletionRequest, body)
            running()
            await until(lambda: worker() is None)
        await pool.read(CompletionRequest, body)
        running().kill()
        with pytest.raises(ApiError) as refused:
            await pool.read(CompletionRequest, body)
        assert refused.value.status == 503
        await pool.read(CompletionRequest, body)
        monkeypatch.setattr(pool_module, "_DEADLINE_S", 0.5)
        running().suspend()
        with pytest.raises(ApiError, match=r"could not be read within 0\.5 s"):
            await pool.read(CompletionRequest, body)
        assert worker() is None

    use(read)


def test_a_closed_pool_leaves_no_process(use: Callable[..., Any]) -> None:
    body = json.dumps({"prompt": "x"} | PADDING).encode()

    async def read(pool: PromptPool) -> None:
        reading = asyncio.create_task(pool.read(CompletionRequest, body))
        await until(lambda: worker() is not None)
        pool.close()
        with pytest.raises(ApiError):
            await reading

    use(read)
    assert worker() is None
