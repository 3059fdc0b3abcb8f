"""The endpoint's metrics under vLLM's names, for dashboards, gateways and autoscalers that expect them.

docs/metrics.md lists them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import Metric
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector

__all__ = ["VllmNames"]


class VllmNames(Collector):
    """Exports metrics a second time: `eaas_x` as `vllm:x`, with vLLM's label `model_name`.

    Args:
        metrics: The metrics with the same meaning as vLLM's.
        model_name: The model's name in the API.
    """

    def __init__(self, metrics: Iterable[MetricWrapperBase], model_name: str) -> None:
        self._metrics = tuple(metrics)
        self._labels = {"model_name": model_name}

    def collect(self) -> Iterator[Metric]:
        """Collect the current values."""
        for metric in self._metrics:
            for family in metric.collect():
                named = Metric(_vllm(family.name), family.documentation, family.type)
                for sample in family.samples:
                    named.add_sample(
                        _vllm(sample.name), {**sample.labels, **self._labels}, sample.value
                    )
                yield named


def _vllm(name: str) -> str:
    return "vllm:" + name.removeprefix("eaas_")
