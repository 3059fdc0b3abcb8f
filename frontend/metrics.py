"""Prometheus metrics of the HTTP endpoint, which serves them at /metrics.

A metric `eaas_x` that vLLM also has is exported again as `vllm:x` with vLLM's label `model_name`, for
dashboards, gateways and autoscalers that expect it (docs/metrics.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector

from eaas.generation.work import Engine
from frontend.tracing import RequestTraces

__all__ = ["EngineMetrics", "ServeMetrics"]

_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)

_Kind = TypeVar("_Kind", bound=MetricWrapperBase)


class ServeMetrics:
    """Prometheus metrics of one HTTP endpoint: requests, tokens, latencies, load.

    Attributes:
        traces: Records each request.
    """

    def __init__(self, registry: CollectorRegistry, traces: RequestTraces | None = None) -> None:
        self.registry = registry
        self.traces = traces or RequestTraces()
        self._like_vllm: list[MetricWrapperBase] = []
        self.http_requests = Counter(
            "eaas_http_requests", "HTTP requests", ["endpoint", "code"], registry=registry
        )
        self.requests = self._add(
            Counter,
            "request_success",
            "Completed generations by reason (abort: the client left)",
            labelnames=["finished_reason"],
        )
        self.prompt_tokens = self._add(Counter, "prompt_tokens", "Prompt tokens")
        self.generation_tokens = self._add(Counter, "generation_tokens", "Generated tokens")
        self.time_to_first_token = self._seconds(
            "time_to_first_token", "Time from the request to its first token"
        )
        self.inter_token_latency = self._seconds(
            "inter_token_latency", "Time between two tokens of a request"
        )
        self.e2e_latency = self._seconds(
            "e2e_request_latency", "Time from the request to its last token"
        )
        self.queue_time = self._seconds(
            "request_queue_time", "Time a request waited for the engine"
        )
        self.prefill_time = self._seconds(
            "request_prefill_time", "Time from a request's start to its first token"
        )
        self.decode_time = self._seconds(
            "request_decode_time", "Time from a request's first token to its last"
        )
        self.request_prompt_tokens = self._add(
            Histogram, "request_prompt_tokens", "Prompt tokens of a request", buckets=_TOKENS
        )
        self.request_generation_tokens = self._add(
            Histogram, "request_generation_tokens", "Generated tokens of a request", buckets=_TOKENS
        )

    def _add(self, kind: type[_Kind], name: str, text: str, **options: Any) -> _Kind:
        metric = kind(f"eaas_{name}", text, registry=self.registry, **options)
        self._like_vllm.append(metric)
        return metric

    def _seconds(self, name: str, text: str) -> Histogram:
        return self._add(Histogram, f"{name}_seconds", text, buckets=_SECONDS)

    def watch(self, engine: Engine, model_name: str) -> None:
        """Read the gauges from an engine, at each scrape; also export what vLLM has as its own."""
        for name, text, read in (
            ("num_requests_running", "Requests in the running batch", engine.running),
            ("num_requests_waiting", "Requests waiting for the engine", engine.waiting),
            ("kv_cache_usage_perc", "Key-value cache in use, 0 to 1", engine.cache_usage),
        ):
            self._add(Gauge, name, text).set_function(read)
        compiled = "1 once forward passes run in compiled code"
        gauge = Gauge("eaas_passes_compiled", compiled, registry=self.registry)
        gauge.set_function(engine.is_compiled)
        tokens = "Tokens that the key-value cache holds; 0: each request has its own"
        gauge = Gauge("eaas_kv_cache_tokens", tokens, registry=self.registry)
        # Known once an engine is connected.
        gauge.set_function(lambda: engine.capacity or 0)
        self.registry.register(_VllmNames(self._like_vllm, model_name))


class _VllmNames(Collector):
    def __init__(self, metrics: list[MetricWrapperBase], model_name: str) -> None:
        self._metrics = metrics
        self._labels = {"model_name": model_name}

    def collect(self) -> Iterator[Metric]:
        for metric in self._metrics:
            for family in metric.collect():
                named = Metric(_vllm(family.name), family.documentation, family.type)
                for sample in family.samples:
                    labels = {**sample.labels, **self._labels}
                    named.samples.append(sample._replace(name=_vllm(sample.name), labels=labels))
                yield named

    # The registry needs the names, to restrict a reading to some of them.
    describe = collect


def _vllm(name: str) -> str:
    return "vllm:" + name.removeprefix("eaas_")


class EngineMetrics(Collector):
    """Prometheus metrics of a frontend's engines: requests that left one, and what the engines count.

    Attributes:
        failovers: Returns the parts of layer calls that they sent to another replica, by reason.
    """

    def __init__(self, registry: CollectorRegistry, traces: RequestTraces | None = None) -> None:
        self.failovers: Callable[[], Mapping[str, int]] = dict
        self._traces = traces or RequestTraces()
        self._pause = Histogram(
            "eaas_frontend_pause_seconds",
            "Time without a token of a request that moved to another engine",
            buckets=_SECONDS,
            registry=registry,
        )
        self._migrations = Counter(
            "eaas_frontend_migrations",
            "Requests that left an engine before their end, by reason",
            ["reason"],
            registry=registry,
        )
        registry.register(self)

    def moved(self, reason: str) -> None:
        """Count a request that left an engine (see `EnginePool`)."""
        self._migrations.labels(reason).inc()

    def paused(self, request_id: str, reason: str, seconds: float) -> None:
        """Record for how long a request that moved had no token (see `EnginePool`)."""
        self._pause.observe(seconds)
        self._traces.moved(request_id, reason, seconds)

    def describe(self) -> Iterator[CounterMetricFamily]:
        """Yield the metrics without values."""
        yield CounterMetricFamily(
            "eaas_engine_failovers",
            "Parts of a layer call that the connected engines sent to another replica",
            labels=["reason"],
        )

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics with their values."""
        for family in self.describe():
            for reason, count in self.failovers().items():
                family.add_metric([reason], count)
            yield family
