"""The HTTP endpoint over tiny local models: real uvicorn, real sockets, OpenAI's client."""

from __future__ import annotations

import atexit
import copy
import json
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import torch
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DeepseekV3Config,
    GptOssConfig,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from attention_client.generation.sizes import EngineSizes
from attention_client.telemetry.tracing import LayerTraces
from byte_tokenizer import byte_tokenizer
from decoding import greedy
from eaas.config import SchedulerConfig
from eaas.net.listen import bind
from eaas_cli.bench.baseline import local_engine
from eaas_cli.demo_model import write_demo_model
from frontend.access import Access
from frontend.app import build_app
from frontend.defaults import ModelFiles
from frontend.limits import ServeLimits
from frontend.network.server import HttpServer
from frontend.tracing import RequestTraces
from waiting import eventually

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
    # 128 positions.
    "yarn": Qwen3MoeConfig(
        **COMMON | {"max_position_embeddings": 32}, head_dim=8, intermediate_size=64,
        moe_intermediate_size=16, num_experts=8, num_experts_per_tok=2,
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ),
    # Its linear attention has no paged form: the sequential engine serves it.
    "qwen3_next": Qwen3NextConfig(
        **COMMON, head_dim=8, moe_intermediate_size=16, shared_expert_intermediate_size=16,
        num_experts=8, num_experts_per_tok=2, linear_num_value_heads=4, linear_num_key_heads=2,
        linear_key_head_dim=8, linear_value_head_dim=8,
        layer_types=["linear_attention", "full_attention"],
    ),
}  # fmt: skip
SIZES = EngineSizes(num_blocks=24, page_size=8, max_batch_tokens=32)
LIMITS = ServeLimits(max_body_bytes=100_000)


def chat_tokenizer() -> Any:
    """A byte tokenizer with a chat template; "</s>" is 257."""
    special = {"unk_token": "<unk>", "eos_token": "</s>", "pad_token": "<pad>"}
    tokenizer = byte_tokenizer(*special.values(), "<s>", **special)
    tokenizer.chat_template = (
        "{% for m in messages %}"
        "{% if m.content == 'refuse' %}{{ raise_exception('no such turn') }}{% endif %}"
        "[{{ m.role }}] {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
    )
    # The prompt worker loads it from there.
    directory = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    tokenizer.save_pretrained(directory)
    tokenizer.name_or_path = directory
    return tokenizer


def tiny_model(kind: str = "qwen3_moe") -> Any:
    torch.manual_seed(0)
    config = copy.deepcopy(CONFIGS[kind])  # an engine sets the attention in it
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():  # otherwise all logits are nearly equal
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6.0)
    return model


def app_over(
    model: Any,
    tokenizer: Any,
    *,
    sizes: EngineSizes = SIZES,
    scheduling: SchedulerConfig | None = None,
    layer_traces: LayerTraces | None = None,
    registry: CollectorRegistry | None = None,
    **options: Any,
) -> Starlette:
    """The endpoint's application over an engine in this process."""
    registry = registry or CollectorRegistry()
    files = ModelFiles(tokenizer, model.config, model.generation_config)
    engine = local_engine(model, sizes, registry, scheduling)
    if layer_traces is not None:
        layer_traces.watch(engine.traced)
    return build_app(engine, files, registry=registry, **options)


class Box:
    """A server over a tiny model whose experts can fail, break or be slow; a context manager."""

    def __init__(
        self,
        kind: str = "qwen3_moe",
        sizes: EngineSizes = SIZES,
        limits: ServeLimits = LIMITS,
        keys: Any = None,
        tracing: Any = None,
        dashboard: Any = None,
        generation: Mapping[str, Any] | None = None,
        hosts: Any = None,
        origins: Any = (),
        chat_template: str | None = None,
    ) -> None:
        self.model = tiny_model(kind)
        self.tokenizer = chat_tokenizer()
        if chat_template is not None:
            self.tokenizer.chat_template = chat_template
        self.error: Exception | None = None
        self.slow_s = 0.0
        self.good = (True, "")
        self.forwards = 0
        self.traces = LayerTraces(tracing) if tracing is not None else None
        self.model.model.layers[-1].mlp.register_forward_pre_hook(self._experts)
        # Before build_app, which may change the model's attention.
        self.expected = {prompt: self._greedy(prompt) for prompt in ("Hello", "abc", "zz top")}
        self.model.generation_config.update(**(generation or {}))
        self.app = app_over(
            self.model,
            self.tokenizer,
            names=["tiny", "/models/tiny"],
            status=lambda: {"epoch": 3, "members": []},
            healthy=lambda: self.good,
            sizes=sizes,
            limits=limits,
            access=Access(keys, hosts),
            origins=origins,
            traces=RequestTraces(tracing),
            layer_traces=self.traces,
            dashboard=dashboard,
        )
        self.server = HttpServer(self.app, bind("127.0.0.1", 0), limits)
        self.server.start()
        self.url = f"http://{self.server.address}"
        self.http = httpx.Client(base_url=self.url, timeout=60)
        self.openai = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def _experts(self, *_: Any) -> None:
        self.forwards += 1
        if self.traces is not None and (trace := self.traces.layer(0, 1)) is not None:
            trace.end()
        time.sleep(self.slow_s)
        if self.error is not None:
            raise self.error

    def _greedy(self, prompt: str) -> list[int]:
        return greedy(self.model, self.tokenizer(prompt)["input_ids"], 24)

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
        eventually(lambda: self.open_requests() == 0, 20.0, "the end of all requests")

    def open_requests(self) -> float:
        """Requests that run or wait in the engine."""
        return sum(self.metric(f"eaas_num_requests_{what}") for what in ("running", "waiting"))

    def __enter__(self) -> Box:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()
        self.openai.close()
        self.server.stop(5.0)


@contextmanager
def demo_endpoint(path: Path, arch: str, name: str) -> Iterator[tuple[str, Any]]:
    """Serve a small demo model of an architecture; yield the URL and the tokenizer."""
    write_demo_model(path, arch, layers=2, hidden=32, experts=4, top_k=2)
    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    app = app_over(
        AutoModelForCausalLM.from_pretrained(path, local_files_only=True).eval(),
        tokenizer,
        names=[name],
        status=lambda: {"epoch": 1, "members": []},
        healthy=lambda: (True, ""),
        sizes=replace(SIZES, num_blocks=500),
        limits=LIMITS,
        access=Access(),
    )
    server = HttpServer(app, bind("127.0.0.1", 0), LIMITS)
    server.start()
    try:
        yield f"http://{server.address}", tokenizer
    finally:
        server.stop(5.0)


def events(text: str) -> list[Any]:
    """The events of a stream without the final [DONE]."""
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


CHAT: Any = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "temperature": 0}
