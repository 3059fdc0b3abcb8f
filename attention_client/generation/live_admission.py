"""Chooses, in the attention client, which waiting requests enter the engine's running batch.

Gives `attention_client.scheduler` the expert loads of requests, and writes its metrics and recording. While
the engine runs, all calls come from its thread.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from attention_client.engines.transformers.dry_run import RouterDryRun
from attention_client.engines.transformers.routes import RouteTap
from attention_client.generation.scheduler import Part, Sequence
from attention_client.generation.scheduler_metrics import SchedulerMetrics
from attention_client.scheduler.admission import Admission
from attention_client.scheduler.predictor import Predictor, correlation
from attention_client.scheduler.recording import QueueSettings, Recorder
from attention_client.scheduler.strategies import Fcfs, Loads, strategy
from eaas.config import SchedulerConfig
from eaas.errors import ConfigError
from eaas.log import get_logger

__all__ = ["LiveAdmission"]

_log = get_logger(__name__)

# Length of a load vector without predictions, when all requests have the same load.
_NO_LOADS = 1
# Deeper layers' routers predict little without attention
# (docs/adr/0021-routers-predict-the-experts-of-prompts.md).
_PREDICTED_LAYERS = 1
# A recording's probe takes about 0.5 ms: half interpreter, half vector instructions, as in an engine's step.
# Once in 0.1 s, so that it costs less than 1 %.
_PROBE_LOOPS, _PROBE_PRODUCTS, _PROBE_SIDE = 4000, 40, 96
_PROBE_EVERY_S = 0.1


@dataclass
class _Prompt:
    """A prompt in prefill, whose experts are recorded.

    Attributes:
        first: Index of the first computed token; the cache held those before it.
        parts: The experts of the computed tokens, each (L, T, K).
    """

    first: int
    parts: list[Any] = field(default_factory=list)


class LiveAdmission:
    """Chooses, before each forward pass, which waiting requests enter the engine's running batch.

    Raises:
        ConfigError: The strategy is unknown, its sizes do not fit, or the recording cannot be written.
    """

    def __init__(self, config: SchedulerConfig, model: Any, metrics: SchedulerMetrics) -> None:
        self.batch_size = config.batch_size
        self._config = config
        self._metrics = metrics
        self._has_failed = False
        self._predictor: Predictor | None = None
        self._tap: RouteTap | None = None
        # Raises for an unknown strategy before the recording's file is created.
        if strategy(config.strategy).needs_loads:
            self._make_predictor(model)
        loads = _NO_LOADS if self._predictor is None else self._predictor.loads
        settings = QueueSettings(config.strategy, loads, config.batch_size, config.window_size)
        self._recorder = self._open_recorder()
        self._probe = _PaceProbe()
        self._step = 0, 0  # requests that decode, tokens of prompts
        self._queue = settings.queue(self._recorder)
        self._admission = Admission(self._queue, config.batch_size)
        # Loads of the waiting and running requests, and the requests whose load is a prediction.
        self._loads: dict[str, Loads] = {}
        self._predicted: set[str] = set()
        self._prompts: dict[str, _Prompt] = {}
        metrics.strategy.labels(strategy=config.strategy).set(1)

    def decline(self) -> None:
        """Leave the order of requests to the sequential engine, which has no batch. Called once, at start."""
        self._show(Fcfs.name)
        self.close()

    def close(self) -> None:
        """Close the recording of scheduling decisions, if there is one, when the engine stops."""
        if self._recorder is not None:
            self._recorder.close()

    # -- requests -------------------------------------------------------------------------------------

    def arrive(self, request: str, tokens: list[int], running: int) -> None:
        """Add a new request to the waiting ones; predict its expert loads if the batch is full.

        Args:
            request: Its id.
            tokens: Its prompt.
            running: Number of running requests. If the batch has room, there is no choice to make and
                nothing is predicted.
        """
        predictor = self._predictor
        if predictor is None:
            load_E = np.ones(_NO_LOADS)
        elif running + len(self._admission) < self.batch_size:
            load_E = predictor.usual()
        else:
            load_E = self._predict(predictor, tokens)
            self._predicted.add(request)
        self._loads[request] = load_E
        self._admission.arrive(request, load_E)

    def put_back(self, request: str) -> None:
        """Put a request evicted from the cache ahead of all waiting ones, with the load that it has."""
        load_E = self._loads[request]
        self.leave(request)
        self._loads[request] = load_E
        self._admission.put_back(request)

    def leave(self, request: str) -> None:
        """Forget a completed or cancelled request."""
        self._admission.leave(request)
        self._predicted.discard(request)
        self._prompts.pop(request, None)
        self._loads.pop(request, None)

    def candidates(self, running: list[Sequence]) -> list[str]:
        """Return the waiting requests that may join the running ones, in order.

        The scheduler admits those that fit into the cache, and passes them to `admit`. If the strategy
        fails, first come, first served replaces it.
        """
        room = self.batch_size - len(running)
        if room <= 0 or not len(self._admission):
            return []
        begin = time.perf_counter()
        try:
            going, choices = self._admission.candidates(room, lambda: self._running(running))
        except Exception as error:
            # A failing strategy of another package must not stop requests.
            if self._has_failed:
                raise
            self._fall_back(error)
            return self.candidates(running)
        if choices:
            self._metrics.decision_seconds.observe((time.perf_counter() - begin) / len(choices))
        for choice in choices:
            self._metrics.chose(choice)
        return going

    def admit(self, requests: Iterable[str]) -> None:
        """Mark these requests as running: the scheduler has put them into the next forward pass."""
        self._admission.admit(requests)

    def _fall_back(self, error: Exception) -> None:
        self._has_failed = True
        name = self._config.strategy
        _log.error("strategy %s failed; %s replaces it: %r", name, Fcfs.name, error)
        self._show(Fcfs.name)
        self._queue.use(Fcfs())

    def _show(self, strategy: str) -> None:
        self._metrics.strategy.labels(strategy=self._config.strategy).set(0)
        self._metrics.strategy.labels(strategy=strategy).set(1)

    # -- expert loads ---------------------------------------------------------------------------------

    @contextlib.contextmanager
    def watching(self, parts: list[Part]) -> Iterator[None]:
        """Record the experts of prompts in the block's forward pass, whose loads replace the predicted ones.

        Args:
            parts: The parts of the pass.
        """
        if self._tap is None or self._predictor is None:
            yield
        else:
            with self._tap.watching(self._predictor.layers) as seen:
                yield
            ids_LTK = seen.ids_LTK()
            if ids_LTK is not None:
                self._saw(self._predictor, parts, ids_LTK)
        if self._recorder is not None:
            answers = sum(not part.is_prefill for part in parts)
            self._step = answers, sum(part.size for part in parts) - answers

    def stepped(self, seconds: float) -> None:
        """Add the time of an engine's step, from scheduling to its tokens, to the recording, if any."""
        if self._recorder is not None:
            self._recorder.note(step=self._step, seconds=seconds)
            probe_s = self._probe.seconds()
            if probe_s is not None:
                self._recorder.note(probe=probe_s)

    def _saw(self, predictor: Predictor, parts: list[Part], ids_LTK: Any) -> None:
        end = 0
        for part in parts:
            begin, end = end, end + part.size
            if not part.is_prefill:
                continue
            name = part.sequence.id
            prompt = self._prompts.setdefault(name, _Prompt(part.begin))
            prompt.parts.append(ids_LTK[:, begin:end])
            if part.samples:
                del self._prompts[name]
                self._prefilled(predictor, part.sequence, prompt)

    def _prefilled(self, predictor: Predictor, sequence: Sequence, prompt: _Prompt) -> None:
        ids_LTK = np.concatenate(prompt.parts, axis=1)
        load_E = predictor.saw(sequence.tokens, prompt.first, ids_LTK)
        request = sequence.id
        if request in self._predicted:
            self._predicted.discard(request)
            self._metrics.correlation.observe(correlation(self._loads[request], load_E))
        self._loads[request] = load_E

    def _running(self, running: list[Sequence]) -> Loads | None:
        """Sum the running requests' loads, each weighted by the rest of its answer, for the strategy."""
        if not running:
            return None
        left = [1 - sequence.answer / sequence.work.max_tokens for sequence in running]
        loads = [self._loads[sequence.id] for sequence in running]
        return np.asarray(np.dot(left, loads), dtype=np.float64)

    def _predict(self, predictor: Predictor, tokens: list[int]) -> Loads:
        before = predictor.cached_tokens, predictor.dry_tokens
        begin = time.perf_counter()
        load_E = predictor.predict(tokens)
        self._metrics.prediction_seconds.observe(time.perf_counter() - begin)
        counted = self._metrics.predicted_tokens
        counted.labels(source="prefix").inc(predictor.cached_tokens - before[0])
        counted.labels(source="dry_run").inc(predictor.dry_tokens - before[1])
        return load_E

    def _make_predictor(self, model: Any) -> None:
        try:
            dry_run = RouterDryRun(model, _PREDICTED_LAYERS)
        except ValueError as error:
            _log.info("no prediction of the experts of requests: %s", error)
            return
        shape = dry_run.tap.shape
        self._tap = dry_run.tap
        self._predictor = Predictor(dry_run, dry_run.layers, shape.num_experts, shape.top_k)

    def _open_recorder(self) -> Recorder | None:
        if not self._config.record:
            return None
        try:
            file = open(self._config.record, "w", encoding="utf-8")  # noqa: SIM115 (closed in `close`)
        except OSError as error:
            raise ConfigError(
                f"attention_client.scheduler.record = {self._config.record!r}: {error.strerror}"
            ) from error
        return Recorder(file, time.monotonic)


class _PaceProbe:
    """Times a fixed computation, at most every 0.1 s, beside the step times of a recording.

    The speed of a shared machine varies by a factor of two within seconds. The times of the engine's steps
    depend on the machine and on the batch; the time of a fixed computation depends on the machine alone.
    """

    def __init__(self) -> None:
        self._matrix = np.random.default_rng(0).standard_normal(
            (_PROBE_SIDE, _PROBE_SIDE), dtype=np.float32
        )
        self._due_s = 0.0

    def seconds(self) -> float | None:
        """Run the computation and return its time, for the recording; None: too early for another run."""
        begin = time.perf_counter()
        if begin < self._due_s:
            return None
        self._due_s = begin + _PROBE_EVERY_S
        total = 0
        for number in range(_PROBE_LOOPS):
            total += number & total
        row = self._matrix[0]
        for _ in range(_PROBE_PRODUCTS):
            row = self._matrix @ row * 0.01
        return time.perf_counter() - begin
