from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from frontend.metrics import ServeMetrics

# The gauges and counters that vLLM's dashboard, the Gateway API's endpoint picker and KEDA ask for.
ASKED = {
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:request_success_total",
    "vllm:time_to_first_token_seconds_bucket",
    "vllm:inter_token_latency_seconds_bucket",
    "vllm:e2e_request_latency_seconds_bucket",
    "vllm:request_queue_time_seconds_sum",
    "vllm:request_prefill_time_seconds_sum",
    "vllm:request_decode_time_seconds_sum",
    "vllm:request_prompt_tokens_bucket",
    "vllm:request_generation_tokens_bucket",
}


def test_vllm_names_have_the_same_values() -> None:
    registry = CollectorRegistry()
    metrics = ServeMetrics(registry)
    engine: Any = SimpleNamespace(
        running=lambda: 3,
        waiting=lambda: 5,
        cache_usage=lambda: 0.25,
        is_compiled=lambda: True,
        capacity=None,
    )
    metrics.watch(engine, "demo")
    metrics.requests.labels("stop").inc(7)
    metrics.time_to_first_token.observe(0.03)
    metrics.http_requests.labels("/v1/models", "200").inc()
    families = list(text_string_to_metric_families(generate_latest(registry).decode()))
    ours = {(s.name, tuple(sorted(s.labels.items()))): s.value for f in families for s in f.samples}
    theirs = {key: value for key, value in ours.items() if key[0].startswith("vllm:")}
    assert {name for name, _ in theirs} >= ASKED
    assert not any("http" in name for name, _ in theirs)
    for (name, labels), value in theirs.items():
        assert ("model_name", "demo") in labels
        left = tuple(pair for pair in labels if pair[0] != "model_name")
        assert ours[name.replace("vllm:", "eaas_"), left] == value
    assert theirs["vllm:num_requests_waiting", (("model_name", "demo"),)] == 5
    assert theirs["vllm:kv_cache_usage_perc", (("model_name", "demo"),)] == 0.25
    kinds = {f.name: f.type for f in families}
    assert kinds["vllm:request_success"] == kinds["eaas_request_success"] == "counter"
    assert kinds["vllm:time_to_first_token_seconds"] == "histogram"
