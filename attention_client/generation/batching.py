"""The attention client's usual engine: continuous batching over a paged key-value cache.

    submit, cancel --> inbox --> [ scheduler -> runner -> deliveries ] --> the event loop of the callers
                                   one thread, a pass at a time

An expected error of a pass (`EaasError`) fails the requests of that pass. Any other one ends the engine:
every request fails, and so does /health.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from attention_client.engines.transformers.paged.cache import PagedCache, windows_of
from attention_client.engines.transformers.paged.model import (
    PagedModel,
    Pass,
    attention_shapes,
    latent_kv_heads,
    use_paged_attention,
)
from attention_client.engines.transformers.rotary import length_rotaries, refuse_new_keys
from attention_client.generation.blocks import BlockPools, Kind
from attention_client.generation.deliveries import Deliveries
from attention_client.generation.live_admission import LiveAdmission
from attention_client.generation.prefill_target import PrefillTarget
from attention_client.generation.runner import Runner
from attention_client.generation.scheduler import Part, Scheduler, Sequence
from attention_client.generation.sizes import EngineSizes
from attention_client.layer_call.expert_attribution import ExpertAttribution
from eaas.errors import ConfigError, EaasError
from eaas.generation.errors import EngineStoppedError
from eaas.generation.work import Delivery, Work, refuse_longer
from eaas.heap import trim_heap

__all__ = ["BatchingEngine"]

_LOG = logging.getLogger(__name__)
# After so long without a request, free memory is returned to the system.
_IDLE_S = 1.0


class BatchingEngine:
    """Engine that runs many requests in one batch (`Engine`).

    Args:
        model: A transformers causal language model on a CPU, in float32 or bfloat16.
        sizes: Sizes of cache and batch.
        admission: Chooses the requests that enter the batch.
        attribution: Records which servers compute a token's experts.

    Raises:
        ConfigError: The cache does not fit into memory.
        ValueError: The model's attention has no paged form.
    """

    def __init__(
        self,
        model: Any,
        sizes: EngineSizes,
        admission: LiveAdmission,
        attribution: ExpertAttribution,
    ) -> None:
        refuse_new_keys(model)
        self._admission = admission
        self._config, self._attention = model.config, model.config._attn_implementation
        rotaries = length_rotaries(model)
        cache = _cache_of(model, sizes, admission.batch_size)
        heads = latent_kv_heads(model.config.get_text_config().num_attention_heads)
        self._model = PagedModel(
            model,
            cache.layers(heads),
            sizes.attention_threads,
        )
        kinds = map(Kind, cache.kinds, cache.blocks, cache.block_bytes)
        self._pools = BlockPools(list(kinds), cache.page)
        self._capacity = self._pools.capacity
        longest = min((rotary.longest for rotary in rotaries), default=None)
        self._log_sizes(longest)
        self._target = PrefillTarget(sizes.token_target_s)
        self._scheduler = Scheduler(
            self._pools, admission, sizes.max_batch_tokens, self._target, longest
        )
        self._runner = Runner(self._model, self._pools, attribution, bool(rotaries))
        self._deliveries = Deliveries()
        self._inbox: queue.SimpleQueue[Sequence | str | None] = queue.SimpleQueue()
        self._traced: list[bytes] = []
        self._failure: str | None = None
        self._stopping, self._stopped = threading.Lock(), False
        self._thread = threading.Thread(target=self._run, name="generation", daemon=True)

    def _log_sizes(self, longest: int | None) -> None:
        if self._capacity is not None:
            _LOG.info("the key-value cache holds %d tokens", self._capacity)
        if longest is not None:
            _LOG.info(
                "requests of more than %d tokens share no blocks of the key-value cache: "
                "their rotary frequencies depend on their length",
                longest,
            )

    @property
    def capacity(self) -> int | None:
        """Most tokens of one request, prompt plus answer: the whole cache. Longer requests are refused."""
        return self._capacity

    def use_compiled(self, compiled: Pass) -> None:
        """Run forward passes in compiled code from the next one on. Called by the thread that compiled it."""
        self._model.compiled = compiled

    def is_compiled(self) -> bool:
        """Whether forward passes run in compiled code, for the metrics."""
        return self._model.compiled is not None

    def start(self) -> None:
        """Start the generation thread; as a daemon, it does not keep the process alive if a pass is stuck."""
        self._thread.start()

    def submit(self, work: Work, deliver: Callable[[Delivery], None]) -> None:
        """Queue a request until the strategy admits it to the batch; `deliver` then gets its tokens.

        Raises:
            EngineStoppedError: The engine has stopped.
            ApiError: The request may get longer than the cache.
        """
        refuse_longer(work, self._capacity)
        self._deliveries.listen(work, deliver)
        # The thread sets it before it fails the listeners.
        if self._failure is not None:
            self._deliveries.forget(work.id)
            raise EngineStoppedError(f"The engine has stopped: {self._failure}")
        self._inbox.put(Sequence(work))

    def cancel(self, request_id: str) -> None:
        """Remove a request from batch and cache before the next forward pass; no effect on a finished one."""
        if self._deliveries.forget(request_id):
            self._inbox.put(request_id)

    def failure(self) -> str | None:
        """Return why the generation thread has stopped; then /health and new requests fail. None: it runs."""
        return self._failure

    def running(self) -> int:
        """Number of requests in the running batch, for the metrics."""
        return len(self._scheduler.running)

    def waiting(self) -> int:
        """Number of requests that wait for a place in the batch, for the metrics."""
        return max(0, len(self._deliveries) - len(self._scheduler.running))

    def traced(self) -> list[bytes]:
        """Return the traces of the requests in the running forward pass (`Work.trace`)."""
        return self._traced

    def cache_usage(self) -> float:
        """Fraction of the key-value cache in use by requests, 0 to 1, for the metrics.

        As in vLLM, blocks kept only for prefix sharing count as free.
        """
        return self._pools.usage()

    def stop(self, timeout_s: float) -> None:
        """Fail all requests, end the generation thread and restore the model's attention implementation.

        Called when the endpoint stops, maybe by two threads; each returns when the engine has stopped.
        """
        error = EngineStoppedError("The server is stopping.")
        self._failure = self._failure or "it was shut down"
        self._deliveries.fail_all(error)
        with self._stopping:
            if not self._stopped:
                self._stopped = True
                self._inbox.put(None)
                if self._thread.is_alive():
                    self._thread.join(timeout_s)
                else:
                    self._admission.close()
                self._config._attn_implementation = self._attention
        self._deliveries.fail_all(error)  # requests that arrived during the stop

    # -- the generation thread ------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._failure is None:
                self._take_in()
                parts = self._scheduler.step()
                if parts:
                    self._pass(parts)
        except Exception as error:  # noqa: BLE001 (delivered to all requests)
            _LOG.exception("the engine has stopped")
            self._failure = f"{type(error).__name__}: {error}"
            self._deliveries.fail_all(
                EngineStoppedError(f"The engine has stopped: {self._failure}")
            )
        finally:
            self._admission.close()

    def _take_in(self) -> None:
        """Take what was submitted or cancelled; wait while there is nothing to compute."""
        is_trimmed = False
        scheduler = self._scheduler
        while True:
            is_busy = bool(scheduler.running or scheduler.waiting)
            try:
                item = self._inbox.get(not is_busy, None if is_trimmed else _IDLE_S)
            except queue.Empty:
                if is_busy:
                    return
                trim_heap()
                is_trimmed = True
                continue
            if item is None:
                return
            if isinstance(item, str):
                scheduler.remove(item)
            else:
                scheduler.add(item)

    def _pass(self, parts: list[Part]) -> None:
        begin = time.perf_counter()
        self._deliveries.begin(parts)
        self._traced = [part.sequence.work.trace for part in parts if part.sequence.work.trace]
        try:
            with self._admission.watching(parts):
                outcomes = self._runner.run(parts)
        except EaasError as error:
            _LOG.warning("a batch failed: %s", error)
            self._deliveries.fail([part.sequence.id for part in parts], error)
            for part in parts:
                self._scheduler.remove(part.sequence.id)
            return
        finally:
            self._traced = []
        self._scheduler.advance(parts, [outcome.token for outcome in outcomes])
        results = [(part.sequence, each) for part, each in zip(parts, outcomes, strict=True)]
        self._deliveries.send(results)
        for sequence, outcome in results:
            if outcome.error is not None or (outcome.token is not None and sequence.is_finished):
                self._scheduler.remove(sequence.id)
        seconds = time.perf_counter() - begin
        prompts = sum(part.size for part in parts if part.is_prefill)
        self._target.observe(sum(part.size for part in parts) - prompts, prompts, seconds)
        self._admission.stepped(seconds)


def _cache_of(model: Any, sizes: EngineSizes, sequences: int) -> PagedCache:
    config = model.config.get_text_config()
    windows = windows_of(config)
    use_paged_attention(model)
    shapes = attention_shapes(model)
    try:
        return PagedCache(
            shapes, windows, model.dtype, sizes.page_size, sizes.num_blocks, sequences
        )
    except MemoryError as error:
        raise ConfigError(
            f"the key-value cache of {sizes.num_blocks or 'at least 64'} blocks of "
            f"{sizes.page_size} tokens does not fit into memory ({error}): "
            "lower attention_client.cache_blocks"
        ) from error
