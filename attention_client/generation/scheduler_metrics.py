"""Prometheus metrics of the scheduler, which chooses the waiting requests that enter the batch."""

from __future__ import annotations

from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from attention_client.scheduler.queue import Choice

__all__ = ["SchedulerMetrics"]

_DECISION_S = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2)
_PREDICTION_S = (1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1)
_REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_CORRELATION = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)


class SchedulerMetrics:
    """Metrics of the scheduler of one attention client's engine; `LiveAdmission` updates them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counter = partial(Counter, registry=registry)
        histogram = partial(Histogram, registry=registry)
        self.strategy = Gauge(
            "eaas_scheduler_strategy",
            "1 for the active selection strategy",
            ["strategy"],
            registry=registry,
        )
        self.choices = counter(
            "eaas_scheduler_choices",
            "Chosen groups of requests: the oldest ones, or others instead",
            ["chosen"],
        )
        self.passed_over = counter(
            "eaas_scheduler_passed_over_requests",
            "Times a younger request was chosen before a waiting one",
        )
        self.window = histogram(
            "eaas_scheduler_window_requests", "Candidate requests of a choice", buckets=_REQUESTS
        )
        self.decision_seconds = histogram(
            "eaas_scheduler_decision_seconds", "Time of a choice", buckets=_DECISION_S
        )
        self.prediction_seconds = histogram(
            "eaas_scheduler_prediction_seconds",
            "Time to predict the experts of a prompt",
            buckets=_PREDICTION_S,
        )
        self.predicted_tokens = counter(
            "eaas_scheduler_predicted_tokens",
            "Prompt tokens with predicted experts, by source: known prefix or dry run",
            ["source"],
        )
        self.correlation = histogram(
            "eaas_scheduler_prediction_correlation",
            "Correlation between predicted and measured expert loads of a prompt",
            buckets=_CORRELATION,
        )

    def chose(self, choice: Choice) -> None:
        """Count a group that the strategy chose, and the older requests that it passed over."""
        self.choices.labels(chosen="oldest" if choice.oldest else "others").inc()
        self.passed_over.inc(choice.passed_over)
        self.window.observe(choice.window)
