"""Prometheus metrics of the HTTP endpoint. Metrics that vLLM has, too, have its names (docs/metrics.md)."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from attention_client.serving.metrics.vllm_names import VllmNames
from attention_client.telemetry.tracing import RequestTraces

__all__ = ["ServeMetrics"]

_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)


class ServeMetrics:
    """Metrics of one application.

    Args:
        registry: The registry for the metrics.

    Attributes:
        traces: Records each request; None: no tracing.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.traces: RequestTraces | None = None
        self.http_requests = Counter(
            "eaas_http_requests", "HTTP requests", ["endpoint", "code"], registry=registry
        )
        self.requests = Counter(
            "eaas_request_success",
            "Completed generations by reason (abort: the client left)",
            ["finished_reason"],
            registry=registry,
        )
        self.prompt_tokens = Counter("eaas_prompt_tokens", "Prompt tokens", registry=registry)
        self.generation_tokens = Counter(
            "eaas_generation_tokens", "Generated tokens", registry=registry
        )
        self.time_to_first_token = self._histogram(
            "eaas_time_to_first_token_seconds", "Time from the request to its first token"
        )
        self.inter_token_latency = self._histogram(
            "eaas_inter_token_latency_seconds", "Time between two tokens of a request"
        )
        self.e2e_latency = self._histogram(
            "eaas_e2e_request_latency_seconds", "Time from the request to its last token"
        )
        self.queue_time = self._histogram(
            "eaas_request_queue_time_seconds", "Time a request waited for the engine"
        )
        self.prefill_time = self._histogram(
            "eaas_request_prefill_time_seconds", "Time from a request's start to its first token"
        )
        self.decode_time = self._histogram(
            "eaas_request_decode_time_seconds", "Time from a request's first token to its last"
        )
        self.request_prompt_tokens = self._histogram(
            "eaas_request_prompt_tokens", "Prompt tokens of a request", _TOKENS
        )
        self.request_generation_tokens = self._histogram(
            "eaas_request_generation_tokens", "Generated tokens of a request", _TOKENS
        )
        self._running = Gauge(
            "eaas_num_requests_running", "Requests in the running batch", registry=registry
        )
        self._waiting = Gauge(
            "eaas_num_requests_waiting", "Requests waiting for the engine", registry=registry
        )
        self._cache_usage = Gauge(
            "eaas_kv_cache_usage_perc",
            "Fraction of the key-value cache used by requests, 0 to 1",
            registry=registry,
        )

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
        return Histogram(name, text, buckets=buckets, registry=self.registry)

    def watch(
        self,
        running: Callable[[], int],
        waiting: Callable[[], int],
        cache_usage: Callable[[], float],
    ) -> None:
        """Read the gauges from the engine at each scrape."""
        self._running.set_function(running)
        self._waiting.set_function(waiting)
        self._cache_usage.set_function(cache_usage)

    def show_as_vllm(self, model_name: str) -> None:
        """Export the metrics that vLLM has, too, also under vLLM's names."""
        same = (
            self.requests,
            self.prompt_tokens,
            self.generation_tokens,
            self.time_to_first_token,
            self.inter_token_latency,
            self.e2e_latency,
            self.queue_time,
            self.prefill_time,
            self.decode_time,
            self.request_prompt_tokens,
            self.request_generation_tokens,
            self._running,
            self._waiting,
            self._cache_usage,
        )
        self.registry.register(VllmNames(same, model_name))
