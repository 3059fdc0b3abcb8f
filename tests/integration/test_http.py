"""The HTTP face over plain tiny models: a real uvicorn, real sockets, OpenAI's own client."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GptOssConfig,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
)

from attention_client.serve import HttpServer, ServeLimits, bind, build_app
from attention_client.serve.requests import ChatRequest, CompletionRequest
from eaas.errors import ConfigError, ExpertsUnavailableError, PortInUseError

pytestmark = pytest.mark.integration

VOCABULARY = 260
END = 257
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": None,
    "eos_token_id": END,
    "pad_token_id": 258,
    "max_position_embeddings": 512,
}
CONFIGS = {
    "qwen3_moe": Qwen3MoeConfig(
        **COMMON, head_dim=8, intermediate_size=64, moe_intermediate_size=16, num_experts=8,
        num_experts_per_tok=2,
    ),
    "gpt_oss": GptOssConfig(
        **COMMON, head_dim=8, intermediate_size=16, num_local_experts=8, num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, sliding_window=16,
    ),
    "deepseek_v3": DeepseekV3Config(
        **COMMON | {"num_key_value_heads": 4}, intermediate_size=64, moe_intermediate_size=16,
        n_routed_experts=8, num_experts_per_tok=2, n_group=2, topk_group=1, q_lora_rank=16,
        kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
        first_k_dense_replace=1,
    ),
}  # fmt: skip
LIMITS = ServeLimits(num_blocks=24, page_size=8, max_batch_tokens=32, max_body_bytes=100_000)


def byte_tokenizer() -> Any:
    """Each byte is a token; "</s>" is 257."""
    vocabulary = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocabulary |= {"<unk>": 256, "</s>": END, "<pad>": 258, "<s>": 259}
    backend = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", eos_token="</s>", pad_token="<pad>"
    )
    tokenizer.chat_template = (
        "{% for m in messages %}"
        "{% if m.content == 'refuse' %}{{ raise_exception('no such turn') }}{% endif %}"
        "[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant] "
    )
    return tokenizer


def tiny_model(kind: str = "qwen3_moe") -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind], dtype=torch.float32).eval()
    with torch.no_grad():  # as they are, all logits are nearly equal
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6.0)
    return model


class Box:
    """A server over a tiny model whose experts can fail, break or be slow."""

    def __init__(self, kind: str = "qwen3_moe", limits: ServeLimits = LIMITS) -> None:
        self.model = tiny_model(kind)
        self.tokenizer = byte_tokenizer()
        self.error: Exception | None = None
        self.slow_s = 0.0
        self.good = (True, "")
        self.forwards = 0
        self.model.model.layers[-1].mlp.register_forward_pre_hook(self._experts)
        # Before build_app: it may give the model another attention.
        self.expected = {prompt: self._greedy(prompt) for prompt in ("Hello", "abc", "zz top")}
        self.app = build_app(
            self.model,
            self.tokenizer,
            model_name="tiny",
            aliases=["/models/tiny"],
            status=lambda: {"epoch": 3, "members": []},
            healthy=lambda: self.good,
            limits=limits,
        )
        self.server = HttpServer(self.app, "127.0.0.1", 0)
        self.server.start()
        self.url = f"http://{self.server.address}"
        self.http = httpx.Client(base_url=self.url, timeout=60)
        self.openai = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def _experts(self, *_: Any) -> None:
        self.forwards += 1
        time.sleep(self.slow_s)
        if self.error is not None:
            raise self.error

    def _greedy(self, prompt: str) -> list[int]:
        prompt_1T = torch.tensor([self.tokenizer(prompt)["input_ids"]])
        out_1T = self.model.generate(
            prompt_1T,
            attention_mask=torch.ones_like(prompt_1T),
            max_new_tokens=24,
            do_sample=False,
            eos_token_id=-1,
        )
        return list(out_1T[0, prompt_1T.shape[1] :].tolist())

    def text(self, prompt: str, tokens: int = 24) -> str:
        return str(self.tokenizer.decode(self.expected[prompt][:tokens], skip_special_tokens=True))

    def complete(self, prompt: Any = "Hello", **fields: Any) -> dict[str, Any]:
        body = {"prompt": prompt, "max_tokens": 24, "ignore_eos": True} | fields
        response = self.http.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        return dict(response.json())

    def metric(self, name: str) -> float:
        lines = self.http.get("/metrics").text.splitlines()
        return sum(
            float(line.split()[-1]) for line in lines if line.split("{")[0].split()[0] == name
        )

    def wait_idle(self) -> None:
        deadline = time.monotonic() + 20
        while self.metric("eaas_num_requests_running") + self.metric("eaas_num_requests_waiting"):
            assert time.monotonic() < deadline, "requests are left in the engine"
            time.sleep(0.02)

    def close(self) -> None:
        self.http.close()
        self.openai.close()
        self.server.stop(5.0)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def shared_box() -> Iterator[Box]:
    box = Box()
    yield box
    box.close()


@pytest.fixture
def box(shared_box: Box) -> Iterator[Box]:
    """The shared server, good and idle again afterwards."""
    yield shared_box
    shared_box.error, shared_box.slow_s, shared_box.good = None, 0.0, (True, "")
    shared_box.wait_idle()


@pytest.fixture
def own_box() -> Iterator[Box]:
    """A server that the test may ruin."""
    box = Box()
    yield box
    box.close()


def events(text: str) -> list[Any]:
    """The events of a stream; the last one must be [DONE]."""
    blocks = text.split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]


def error_of(response: httpx.Response) -> dict[str, Any]:
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    assert body["error"]["type"]
    return dict(body["error"])


# -- OpenAI's client ------------------------------------------------------------------------------

CHAT: Any = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "temperature": 0}


def test_openai_chat(box: Box) -> None:
    whole = box.openai.chat.completions.create(**CHAT, max_tokens=9)
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].finish_reason in ("length", "stop")
    assert whole.usage is not None
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    stream = list(
        box.openai.chat.completions.create(
            **CHAT, max_tokens=9, stream=True, stream_options={"include_usage": True}
        )
    )
    assert stream[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in stream if c.choices)
    assert text == whole.choices[0].message.content
    assert stream[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert stream[-1].choices == []
    assert stream[-1].usage == stream[-2].usage == whole.usage
    assert {chunk.id for chunk in stream} == {stream[0].id} != {whole.id}


def test_openai_completions(box: Box) -> None:
    body: Any = {"model": "tiny", "prompt": "Hello", "max_tokens": 24}
    extra = {"ignore_eos": True}
    whole = box.openai.completions.create(**body, extra_body=extra)
    assert whole.choices[0].text == box.text("Hello")
    assert whole.choices[0].finish_reason == "length"
    stream = list(box.openai.completions.create(**body, extra_body=extra, stream=True))
    assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text
    assert [c.choices[0].finish_reason for c in stream] == [None] * (len(stream) - 1) + ["length"]
    assert stream[-1].usage == whole.usage


def test_openai_models_and_errors(box: Box) -> None:
    assert [model.id for model in box.openai.models.list()] == ["tiny"]
    assert box.openai.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="nope"):
        box.openai.chat.completions.create(**CHAT | {"model": "nope"})
    with pytest.raises(openai.BadRequestError, match="temperature"):
        box.openai.chat.completions.create(**CHAT | {"temperature": 3})
    alias = CHAT | {"model": "/models/tiny", "max_tokens": 1}
    assert box.openai.chat.completions.create(**alias).model == "tiny"


# -- sampling -------------------------------------------------------------------------------------


@pytest.mark.parametrize("greedy_first", [True, False])
def test_greedy_is_exact_beside_sampled_requests(box: Box, greedy_first: bool) -> None:
    def ask(index: int) -> tuple[str, str]:
        prompt = ("Hello", "abc", "zz top")[index % 3]
        greedy = (index % 2 == 0) == greedy_first
        fields = {"temperature": 0} if greedy else {"temperature": 1.5, "top_p": 0.95}
        text = box.complete(prompt, **fields)["choices"][0]["text"]
        return prompt if greedy else "", text

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(12)))
    greedy = [(prompt, text) for prompt, text in answers if prompt]
    assert len(greedy) == 6
    assert all(text == box.text(prompt) for prompt, text in greedy)
    sampled = [text for prompt, text in answers if not prompt]
    assert len(set(sampled)) == len(sampled)


def test_a_seed_repeats_its_answer_whatever_runs_beside_it(box: Box) -> None:
    def ask(seed: int | None) -> str:
        return str(box.complete(temperature=1.0, seed=seed)["choices"][0]["text"])

    first = ask(5)
    with ThreadPoolExecutor(6) as pool:
        same, other, *_rest = pool.map(ask, [5, 6, None, None, 5, 8])
    assert same == first
    assert other != first


def test_min_tokens_keeps_the_end_away(box: Box) -> None:
    # At this temperature every token, an end too, is about equally likely.
    box.model.lm_head.weight.data.mul_(1e-3)
    try:
        answers = [
            box.complete(temperature=2.0, seed=seed, ignore_eos=False, min_tokens=20, max_tokens=24)
            for seed in range(12)
        ]
    finally:
        box.model.lm_head.weight.data.mul_(1e3)
    assert all(answer["usage"]["completion_tokens"] >= 20 for answer in answers)


# -- ends of an answer ----------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings(box: Box, stream: bool) -> None:
    text = box.text("Hello")
    stop = text[8:11]
    expected = text[: text.index(stop)]
    body = {"prompt": "Hello", "max_tokens": 24, "ignore_eos": True, "stop": ["never?", stop]}
    response = box.http.post("/v1/completions", json=body | {"stream": stream})
    if stream:
        chunks = events(response.text)
        got = "".join(chunk["choices"][0]["text"] for chunk in chunks)
        choice, usage = chunks[-1]["choices"][0], chunks[-1]["usage"]
    else:
        choice, usage = response.json()["choices"][0], response.json()["usage"]
        got = choice["text"]
    assert (got, choice["finish_reason"]) == (expected, "stop")
    assert usage["completion_tokens"] < 24


def test_end_token_on_the_last_allowed_place_is_a_stop() -> None:
    box = Box()
    try:
        service_end = box.expected["Hello"][5]
        first = box.expected["Hello"].index(service_end)
    finally:
        box.close()
    model = box.model
    model.generation_config.eos_token_id = [service_end]
    app = build_app(
        model,
        box.tokenizer,
        model_name="tiny",
        status=dict,
        healthy=lambda: (True, ""),
        limits=LIMITS,
    )
    server = HttpServer(app, "127.0.0.1", 0)
    server.start()
    try:
        for allowed, reason in ((first + 1, "stop"), (first + 9, "stop"), (first, "length")):
            if not allowed:
                continue
            body = {"prompt": "Hello", "max_tokens": allowed}
            answer = httpx.post(
                f"http://{server.address}/v1/completions", json=body, timeout=60
            ).json()
            assert answer["choices"][0]["finish_reason"] == reason
            assert answer["usage"]["completion_tokens"] == min(allowed, first + 1)
            assert answer["choices"][0]["text"] == box.text("Hello", first)
    finally:
        server.stop(5.0)


def test_default_budgets(box: Box) -> None:
    answer = box.http.post("/v1/completions", json={"prompt": "a", "ignore_eos": True}).json()
    assert answer["usage"]["completion_tokens"] == 16
    answer = box.http.post("/v1/chat/completions", json=CHAT | {"ignore_eos": True}).json()
    usage, room = answer["usage"], box.http.get("/v1/models/tiny").json()["max_model_len"]
    assert usage["total_tokens"] == room == 24 * 8  # less than 1024 fits


def test_one_token_answers_never_hang(box: Box) -> None:
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: box.complete(max_tokens=1, stream=False), range(24)))
        streams = list(
            pool.map(
                lambda _: (
                    box.http.post(
                        "/v1/completions", json={"prompt": "abc", "max_tokens": 1, "stream": True}
                    ).text
                ),
                range(24),
            )
        )
    assert {answer["choices"][0]["text"] for answer in answers} == {box.text("Hello", 1)}
    assert all(events(stream)[-1]["choices"][0]["finish_reason"] for stream in streams)


# -- many requests --------------------------------------------------------------------------------


def test_more_requests_than_the_cache_holds_wait(box: Box) -> None:
    with ThreadPoolExecutor(32) as pool:
        prompts = ["Hello", "abc", "zz top", "Hello"] * 8
        answers = list(pool.map(box.complete, prompts))
    assert [a["choices"][0]["text"] for a in answers] == [box.text(prompt) for prompt in prompts]
    assert len({a["id"] for a in answers}) == 32


def test_equal_request_ids_do_not_collide(box: Box) -> None:
    box.slow_s = 0.005

    def ask(prompt: str) -> httpx.Response:
        return box.http.post(
            "/v1/completions",
            json={"prompt": prompt, "max_tokens": 24, "ignore_eos": True},
            headers={"X-Request-Id": "mine"},
        )

    with ThreadPoolExecutor(3) as pool:
        responses = list(pool.map(ask, box.expected))
    assert [r.json()["choices"][0]["text"] for r in responses] == [
        box.text(p) for p in box.expected
    ]
    assert {r.headers["x-request-id"] for r in responses} == {"mine"}
    assert len({r.json()["id"] for r in responses}) == 3


def test_a_full_queue_pushes_back() -> None:
    box = Box(limits=ServeLimits(num_blocks=24, page_size=8, max_batch_tokens=32, max_requests=2))
    try:
        box.slow_s = 0.02
        with ThreadPoolExecutor(6) as pool:
            responses = list(
                pool.map(
                    lambda _: box.http.post(
                        "/v1/completions",
                        json={"prompt": "abc", "max_tokens": 24, "ignore_eos": True},
                    ),
                    range(6),
                )
            )
        refused = [r for r in responses if r.status_code == 429]
        assert {r.status_code for r in responses} == {200, 429}
        assert error_of(refused[0])["code"] == "overloaded"
        assert refused[0].headers["retry-after"]
        box.wait_idle()
        box.complete()
    finally:
        box.close()


# -- failures -------------------------------------------------------------------------------------


def test_unavailable_experts_fail_only_their_batch(box: Box) -> None:
    box.error = ExpertsUnavailableError(1, [3, 5], 'nobody "answers"')
    body = {"prompt": "Hello", "max_tokens": 8}
    response = box.http.post("/v1/completions", json=body)
    assert response.status_code == 503
    error = error_of(response)
    assert error["type"] == "experts_unavailable"
    assert 'layer 1: no live replica of expert(s) 3, 5: nobody "answers"' in error["message"]
    chunks = events(box.http.post("/v1/completions", json=body | {"stream": True}).text)
    assert chunks == [{"error": error}]
    with pytest.raises(openai.APIError, match="no live replica"):
        list(box.openai.chat.completions.create(**CHAT, stream=True))
    box.wait_idle()
    assert box.http.get("/health").status_code == 200
    box.error = None
    with ThreadPoolExecutor(8) as pool:  # nothing of the cache was lost
        answers = list(pool.map(box.complete, ["Hello"] * 24))
    assert {answer["choices"][0]["text"] for answer in answers} == {box.text("Hello")}


def test_failure_in_the_middle_of_a_stream(box: Box) -> None:
    box.slow_s = 0.01
    body = {"prompt": "Hello", "max_tokens": 150, "ignore_eos": True, "stream": True}
    text = ""
    with box.http.stream("POST", "/v1/completions", json=body) as response:
        for piece in response.iter_text():
            text += piece
            if text.count("data:") >= 3:
                box.error = ExpertsUnavailableError(0, [1], "gone")
    chunks = events(text)
    assert "error" in chunks[-1]
    assert all("choices" in chunk for chunk in chunks[:-1])


def test_a_bug_in_the_model_is_told_to_everybody(own_box: Box) -> None:
    own_box.error = RuntimeError("a bug")
    body = {"prompt": "Hello", "max_tokens": 4}
    with ThreadPoolExecutor(4) as pool:
        responses = list(
            pool.map(lambda _: own_box.http.post("/v1/completions", json=body), range(4))
        )
    for response in [
        *responses,
        own_box.http.post("/v1/completions", json=body | {"stream": True}),
    ]:
        assert response.status_code == 503
        assert "a bug" in error_of(response)["message"]
    health = own_box.http.get("/health")
    assert health.status_code == 503
    assert "a bug" in health.json()["reason"]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("kind", ["qwen3_moe", "deepseek_v3"])
def test_a_client_that_leaves_frees_its_place(kind: str, stream: bool) -> None:
    box = Box(kind)
    try:
        box.slow_s = 0.02
        body = {"prompt": "Hello", "max_tokens": 180, "ignore_eos": True, "stream": stream}
        before = box.forwards

        async def leave() -> None:
            async with httpx.AsyncClient(base_url=box.url, timeout=60) as client:
                task = asyncio.ensure_future(client.post("/v1/completions", json=body))
                while box.forwards < before + 3:
                    await asyncio.sleep(0.005)
                task.cancel()

        asyncio.run(leave())
        box.wait_idle()
        assert box.forwards - before < 180
        assert box.metric("eaas_request_success_total") == 1
        box.slow_s = 0.0
        assert box.complete()["choices"][0]["text"] == box.text("Hello")
    finally:
        box.close()


# -- requests that cannot be served ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "content", "status"),
    [
        ("/v1/completions", b"{not json", 400),
        ("/v1/completions", b"\xff\xfe", 400),
        ("/v1/completions", b"", 400),
        ("/v1/completions", b"[1, 2]", 400),
        ("/v1/completions", b'"text"', 400),
        ("/v1/completions", b"null", 400),
        ("/v1/completions", b"{}", 400),
        ("/v1/completions", b"[" * 20_000, 400),
        ("/v1/completions", b'{"prompt": ' + b"[" * 900 + b"]" * 900 + b"}", 400),
        ("/v1/completions", b'{"prompt": "a", "temperature": NaN}', 400),
        ("/v1/completions", b'{"prompt": "a", "temperature": Infinity}', 400),
        ("/v1/completions", b'{"prompt": "\\ud800"}', 400),
        ("/v1/completions", b'{"prompt": "a", "\\ud800": 1}', 400),
        ("/v1/completions", b'{"prompt": "a", "model": "b\\u0000"}', 404),
        ("/v1/completions", b'{"prompt": ""}', 400),
        ("/v1/completions", b'{"prompt": [5, 260]}', 400),
        ("/v1/completions", b'{"prompt": [-1]}', 400),
        ("/v1/completions", b'{"prompt": "%s"}' % (b"a" * 100_000), 413),
        ("/v1/chat/completions", b'{"messages": []}', 400),
        ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "refuse"}]}', 400),
        (
            "/v1/chat/completions",
            b'{"messages": [{"role": "user", "content": "a"}], "tools":'
            b' [{"type": "function", "function": {"name": "f"}}]}',
            400,
        ),
        (
            "/v1/chat/completions",
            b'{"messages": [{"role": "user", "content": "a"}],'
            b' "chat_template_kwargs": {"tokenize": true}}',
            400,
        ),
        ("/v1/nothing", b"{}", 404),
        ("/reset", b"{}", 404),
        ("/load_model", b"{}", 404),
        ("/v1/responses", b"{}", 404),
        ("/v1/systemone", b"{}", 404),
        ("/v1/audio/transcriptions", b"{}", 404),
        ("/v1/models", b"{}", 405),
    ],
)
def test_bad_requests(box: Box, path: str, content: bytes, status: int) -> None:
    response = box.http.post(path, content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == status, response.text
    error_of(response)


def test_other_ways_to_be_wrong(box: Box) -> None:
    body = b'{"prompt": "a"}'
    for media_type in ("text/plain", ""):
        response = box.http.post(
            "/v1/completions", content=body, headers={"Content-Type": media_type}
        )
        assert response.status_code == 415
        error_of(response)
    response = box.http.post(
        "/v1/completions", content=body, headers={"Content-Type": "application/json; charset=utf-8"}
    )
    assert response.status_code == 200
    response = box.http.get("/v1/completions")
    assert response.status_code == 405
    error_of(response)
    pieces = (b"x" * 10_000 for _ in range(50))  # no Content-Length
    response = box.http.post(
        "/v1/completions", content=pieces, headers={"Content-Type": "application/json"}
    )
    assert response.status_code == 413


def test_what_is_too_long_is_refused_with_both_numbers(box: Box) -> None:
    limit = 24 * 8
    response = box.http.post("/v1/completions", json={"prompt": "a" * 100, "max_tokens": 93})
    assert response.status_code == 400
    error = error_of(response)
    assert error["code"] == "context_length_exceeded"
    assert str(limit) in error["message"]
    assert "193" in error["message"]
    response = box.http.post("/v1/completions", json={"prompt": "a" * limit})
    assert response.status_code == 400
    box.complete("a" * 100, max_tokens=92)  # exactly fits
    assert box.complete("a" * (limit - 1), max_tokens=1)["usage"]["total_tokens"] == limit


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(st.characters(), max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)
NAMES = st.sampled_from([*ChatRequest.model_fields, *CompletionRequest.model_fields])
SENSIBLE = st.fixed_dictionaries(
    {},
    optional={
        "prompt": st.text(st.characters(), max_size=9) | st.lists(st.integers(-1, 261), max_size=4),
        "messages": st.lists(
            st.fixed_dictionaries(
                {"role": st.sampled_from(["user", "assistant", "system", "tool"])},
                optional={"content": st.text(st.characters(), max_size=9)},
            ),
            max_size=3,
        ),
        "temperature": st.floats(0, 2),
        "top_p": st.floats(0, 1),
        "top_k": st.integers(-1, 2**40),
        "stop": st.lists(st.text(max_size=2), max_size=3),
        "stream": st.booleans(),
        "chat_template_kwargs": st.dictionaries(st.text(max_size=5), VALUES, max_size=2),
    },
)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from(["/v1/completions", "/v1/chat/completions"]),
    SENSIBLE,
    st.dictionaries(NAMES, VALUES, max_size=2) | st.just({}),
)
def test_no_body_makes_a_500(
    shared_box: Box, path: str, sensible: dict[str, Any], odd: dict[str, Any]
) -> None:
    body = {"max_tokens": 2} | sensible | odd
    response = shared_box.http.post(
        path, content=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
    )
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code != 200:
        error_of(response)


# -- the other routes -----------------------------------------------------------------------------


def test_health_status_and_metrics(box: Box) -> None:
    assert box.http.get("/health").json() == {"status": "ok"}
    box.good = (False, "no expert server")
    response = box.http.get("/health")
    assert response.status_code == 503
    assert response.json()["reason"] == "no expert server"
    assert box.http.get("/eaas/v1/status").json() == {"epoch": 3, "members": []}
    names = ("eaas_prompt_tokens_total", "eaas_generation_tokens_total")
    before = [box.metric(name) for name in names]
    box.complete()
    assert [box.metric(name) - b for name, b in zip(names, before, strict=True)] == [5, 24]
    text = box.http.get("/metrics").text
    assert 'eaas_http_requests_total{code="200",endpoint="/v1/completions"}' in text
    for name in (
        "eaas_time_to_first_token_seconds",
        "eaas_inter_token_latency_seconds",
        "eaas_request_queue_time_seconds",
        "eaas_e2e_request_latency_seconds",
    ):
        assert box.metric(f"{name}_count") > 0
    box.http.get("/some/scanner/path")
    assert "scanner" not in box.http.get("/metrics").text


# -- models ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "batched"), [("gpt_oss", True), ("deepseek_v3", False)])
def test_other_attentions(kind: str, batched: bool) -> None:
    box = Box(kind)
    try:
        before = box.forwards
        with ThreadPoolExecutor(3) as pool:
            answers = list(pool.map(box.complete, box.expected))
        assert [a["choices"][0]["text"] for a in answers] == [box.text(p) for p in box.expected]
        assert (box.forwards - before < 3 * 24) == batched
        assert box.model.config._attn_implementation == ("paged|eager" if batched else "sdpa")
        seeded = [box.complete(temperature=1.0, seed=3)["choices"][0]["text"] for _ in range(2)]
        assert seeded[0] == seeded[1] != box.text("Hello")
        assert box.complete(stop=box.text("Hello")[4])["choices"][0]["finish_reason"] == "stop"
        box.error = ExpertsUnavailableError(1, [3], "gone")
        response = box.http.post("/v1/completions", json={"prompt": "a"})
        assert response.status_code == 503
        assert error_of(response)["type"] == "experts_unavailable"
        body = {"prompt": "a", "stream": True}
        assert list(events(box.http.post("/v1/completions", json=body).text)[-1]) == ["error"]
        box.error = None
        assert box.complete()["choices"][0]["text"] == box.text("Hello")
    finally:
        box.close()


def test_a_cache_larger_than_memory_is_named() -> None:
    with pytest.raises(ConfigError, match="1000000000 blocks of 8 tokens does not fit"):
        Box(limits=ServeLimits(num_blocks=10**9, page_size=8))


# -- the server -----------------------------------------------------------------------------------


def test_a_taken_port_is_named() -> None:
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(PortInUseError, match=f"127.0.0.1:{port} is in use"):
            bind("127.0.0.1", port)


@pytest.mark.parametrize("kind", ["qwen3_moe", "deepseek_v3"])
def test_open_streams_do_not_hold_the_process(kind: str) -> None:
    others = set(threading.enumerate())
    box = Box(kind)
    box.slow_s = 0.05
    body = {"prompt": "Hello", "max_tokens": 180, "ignore_eos": True, "stream": True}
    with box.http.stream("POST", "/v1/completions", json=body) as response:
        pieces = response.iter_text()
        text = next(pieces)
        begun = time.monotonic()
        box.server.stop(0.3)
        assert time.monotonic() - begun < 8  # the stream alone would take 9 s more
        text += "".join(pieces)
    assert "stopping" in events(text)[-1]["error"]["message"]
    box.http.close()
    box.openai.close()
    left = {thread.name for thread in set(threading.enumerate()) - others}
    assert not left & {"generation", "http"}
    host, port = box.server.address.split(":")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), timeout=5)


def test_running_requests_end_within_the_grace(own_box: Box) -> None:
    own_box.slow_s = 0.01
    with ThreadPoolExecutor(1) as pool:
        before = own_box.forwards
        answer = pool.submit(own_box.complete)
        while own_box.forwards < before + 2:
            time.sleep(0.005)
        own_box.server.stop(20.0)
        assert answer.result()["choices"][0]["text"] == own_box.text("Hello")


def test_a_full_cache_lets_others_in_after_the_running_ones_left() -> None:
    """transformers lets nobody in once the cache was full, until a request runs to its end."""
    box = Box(limits=ServeLimits(num_blocks=16, page_size=8, max_batch_tokens=32))
    try:
        box.slow_s = 0.01
        body = {"max_tokens": 90, "ignore_eos": True, "stream": True}
        # Different from the first token on: nothing is shared in the cache.
        streams = [
            box.http.stream("POST", "/v1/completions", json=body | {"prompt": f"{i}" * 20})
            for i in range(3)
        ]
        answers = [stream.__enter__() for stream in streams]
        scheduler = box.app.state.end_requests.__self__.engine.manager.batch_processor.scheduler
        deadline = time.monotonic() + 20
        while not scheduler.block_new_requests:
            assert time.monotonic() < deadline, "the cache was never full"
            time.sleep(0.002)
        for answer in answers:
            answer.close()
        for stream in streams:
            stream.__exit__(None, None, None)
        box.slow_s = 0.0
        assert box.complete()["choices"][0]["text"] == box.text("Hello")
    finally:
        box.close()
