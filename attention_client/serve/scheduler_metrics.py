"""What the scheduler's choices look like from outside (Prometheus)."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from attention_client.scheduler.queue import Choice

__all__ = ["SchedulerMetrics"]

_DECISION_S = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2)
_PREDICTION_S = (1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1)
_REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_CORRELATION = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)


class SchedulerMetrics:
    """Counters of one engine's scheduler.

    Args:
        registry: Where they are registered.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.strategy = Gauge(
            "eaas_scheduler_strategy",
            "1 for the strategy that chooses which requests run together",
            ["strategy"],
            registry=registry,
        )
        self.choices = Counter(
            "eaas_scheduler_choices",
            "Groups of requests that were chosen: the oldest ones, or others in their place",
            ["chosen"],
            registry=registry,
        )
        self.passed_over = Counter(
            "eaas_scheduler_passed_over_requests",
            "Times that a request waited on while a younger one was chosen",
            registry=registry,
        )
        self.window = Histogram(
            "eaas_scheduler_window_requests",
            "Requests that there were to choose from",
            buckets=_REQUESTS,
            registry=registry,
        )
        self.decision_seconds = Histogram(
            "eaas_scheduler_decision_seconds",
            "Time of a choice",
            buckets=_DECISION_S,
            registry=registry,
        )
        self.prediction_seconds = Histogram(
            "eaas_scheduler_prediction_seconds",
            "Time to predict which experts a prompt will use",
            buckets=_PREDICTION_S,
            registry=registry,
        )
        self.predicted_tokens = Counter(
            "eaas_scheduler_predicted_tokens",
            "Prompt tokens whose experts were predicted, by what is known of the prefix or by a dry run",
            ["source"],
            registry=registry,
        )
        self.correlation = Histogram(
            "eaas_scheduler_prediction_correlation",
            "Correlation of a prompt's predicted expert loads with those that prefill saw",
            buckets=_CORRELATION,
            registry=registry,
        )

    def chose(self, choice: Choice) -> None:
        """A group was chosen."""
        self.choices.labels(chosen="oldest" if choice.oldest else "others").inc()
        self.passed_over.inc(choice.passed_over)
        self.window.observe(choice.window)
