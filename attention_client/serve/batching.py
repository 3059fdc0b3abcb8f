"""transformers' continuous batching, made fit for serving.

What is changed, and why (transformers 5.23):

- An error that the model raises on purpose (`EaasError`) fails the requests of its batch; there,
  any exception ends the worker thread for ever.
- A full cache does not keep new requests out after the last running one was cancelled.
- A request has its listener before it enters the queue; there, a fast one can finish unheard.
- Output that nobody listens to is dropped; there, it is kept for ever.
- Whoever waits hears of a dead worker, even if the request was between two queues.
- Sampling is each request's own (`sampling.py`).
- A strategy chooses which of the waiting requests go in (`strategy_scheduler.py`).
- Without requests it looks once a second for what did not ring, not ten times.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.cli.serving.utils import CBWorkerDeadError
from transformers.generation.continuous_batching.continuous_api import (
    BackgroundThreadStatus,
    ContinuousBatchingManager,
    OutputRouter,
)
from transformers.generation.continuous_batching.model_runner import infer_max_single_request_tokens

from attention_client.serve.engine import NOBODY, Delivery, Work
from attention_client.serve.heap import trim_heap
from attention_client.serve.limits import ServeLimits
from attention_client.serve.live_admission import LiveAdmission
from attention_client.serve.sampling import BatchSampler
from attention_client.serve.strategy_scheduler import StrategyScheduler
from attention_client.witness import SeenServers, Witness
from eaas.errors import ConfigError, EaasError

__all__ = ["BatchingEngine", "fits_paged_cache"]

_LOG = logging.getLogger(__name__)
_IDLE_S = 1.0


class _Listener:
    """Where the deliveries of one request go."""

    def __init__(self, deliver: Callable[[Delivery], None]) -> None:
        self.deliver = deliver
        self.loop = asyncio.get_running_loop()
        self.seen = 0  # tokens delivered


class _Router(OutputRouter):  # type: ignore[misc]
    """Brings outputs from the worker thread to the event loops of those who listen."""

    def __init__(self) -> None:
        super().__init__()
        self._listeners: dict[str, _Listener] = {}
        # Who wants to know which servers compute its tokens; and those of the step at hand.
        self._asking: set[str] = set()
        self._servers: dict[str, Mapping[str, int]] = {}
        self._guard = threading.Lock()

    def listen(self, request_id: str, deliver: Callable[[Delivery], None], servers: bool) -> None:
        with self._guard:
            self._listeners[request_id] = _Listener(deliver)
            if servers:
                self._asking.add(request_id)

    @property
    def asks_for_servers(self) -> bool:
        return bool(self._asking)

    def note_servers(self, batch: Sequence[Any], seen: SeenServers) -> None:
        """Who computed the tokens that the next deliveries have (transformers' `FutureRequestState`)."""
        end = 0
        # Guarded: what is noted of a request that is forgotten at the same time would stay.
        with self._guard:
            for part in batch:
                end += part.query_length
                # A step's last token of a request is the one that the next is chosen by.
                if part.has_new_token and part.state.request_id in self._asking:
                    self._servers[part.state.request_id] = seen.of(end - 1)

    def forget(self, request_id: str) -> bool:
        """Whether somebody listened."""
        with self._guard:
            return self._pop(request_id) is not None

    def _pop(self, request_id: str) -> _Listener | None:
        self._asking.discard(request_id)
        self._servers.pop(request_id, None)
        return self._listeners.pop(request_id, None)

    def deliver(self, output: Any) -> None:
        self.deliver_batch([output])

    def deliver_batch(self, outputs: list[Any]) -> None:
        with self._guard:
            calls = []
            for output in outputs:
                listener = self._listeners.get(output.request_id)
                if listener is None:
                    continue  # cancelled meanwhile
                tokens = output.generated_tokens[listener.seen :]
                listener.seen += len(tokens)
                finished = output.is_finished()
                servers = self._servers.pop(output.request_id, NOBODY)
                if finished:
                    self._pop(output.request_id)
                queued_s = output.lifespan[0] - output.created_time
                delivery = Delivery(tokens, finished, output.error, queued_s, servers)
                calls.append((listener, delivery))
        self._call(calls)

    def fail_and_deliver(self, state: Any, error: Exception) -> None:
        # The base keeps the text of the error only; who waits needs its type.
        self._fail([state.request_id], error)

    def fail_all(self, error: Exception) -> None:
        """Nobody waits for anything any more."""
        self._fail(list(self._listeners), error)

    def _fail(self, request_ids: list[str], error: Exception) -> None:
        if not isinstance(error, (EaasError, CBWorkerDeadError)):
            error = CBWorkerDeadError(f"The engine has stopped: {error}")
        with self._guard:
            failed = [self._pop(request_id) for request_id in request_ids]
        delivery = Delivery([], finished=True, error=error)
        self._call([(listener, delivery) for listener in failed if listener is not None])

    def _call(self, calls: list[tuple[_Listener, Delivery]]) -> None:
        # One wake-up per loop and batch: it costs more than the calls themselves.
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Listener, Delivery]]] = {}
        for call in calls:
            by_loop.setdefault(call[0].loop, []).append(call)
        for loop, batch in by_loop.items():
            try:
                loop.call_soon_threadsafe(_deliver_all, batch)
            except RuntimeError:  # the HTTP server's loop ended before its last requests
                _LOG.info("%d deliveries after the end of their event loop", len(batch))


def _deliver_all(batch: list[tuple[_Listener, Delivery]]) -> None:
    for listener, delivery in batch:
        listener.deliver(delivery)


class _Manager(ContinuousBatchingManager):  # type: ignore[misc]
    """The manager with the changes that the module's text names."""

    def __init__(
        self, model: Any, limits: ServeLimits, admission: LiveAdmission, witness: Witness
    ) -> None:
        self._admission, self._witness = admission, witness
        super().__init__(
            model=model,
            # Greedy, since the sampler below leaves one token to choose; no end, since each request
            # brings its own.
            generation_config=GenerationConfig(do_sample=False, eos_token_id=-1),
            continuous_batching_config=ContinuousBatchingConfig(
                num_blocks=limits.num_blocks,
                page_size=limits.page_size,
                max_batch_tokens=limits.max_batch_tokens,
                # A forward pass that waits for remote experts can neither be captured as a graph
                # nor prepared ahead.
                use_cuda_graph=False,
                use_async_batching=False,
                # Whoever loads the model chooses its attention; a switch here may fetch kernels.
                auto_switch_to_flash=False,
            ),
        )
        self.output_router = _Router()
        self._wake_up_loop = _Bell()
        processors = self.logit_processor
        processors.logits_processor.append(BatchSampler())
        processors.tensors_required += 1
        processors.do_processing = True
        processors._retrieve_processors_kwargs()

    def start(self) -> None:
        """Starts the thread, as a daemon: one stuck forward pass must not hold the process."""
        self.background_thread_status.clear()
        self._generation_thread = threading.Thread(
            target=self._run_generation_loop, name="generation", daemon=True
        )
        self._generation_thread.start()

    def _create_batch_processor(self) -> Any:
        processor = super()._create_batch_processor()
        if not isinstance(
            processor.scheduler, StrategyScheduler
        ):  # it is made once, and then reset
            scheduler = StrategyScheduler(processor.scheduler, self._admission)
            processor.scheduler = processor.offloading_manager.scheduler = scheduler
        return processor

    def _generation_step(self) -> None:
        outputs = self.batch_processor.inputs_and_outputs
        router = self.output_router
        with (
            self._admission.watching(lambda: outputs.requests_in_batch),
            self._witness.watching(router.asks_for_servers) as seen,
        ):
            super()._generation_step()
        if seen is not None:
            router.note_servers(outputs.requests_in_batch, seen)

    def _generation_loop_body(self, batch_processor: Any, bootstrapping: bool) -> bool:
        scheduler = batch_processor.scheduler
        if not scheduler.active_requests:
            # Set when the cache is full, and taken back only where a request runs to its end: not
            # after the last one was cancelled or failed.
            scheduler.block_new_requests = False
        self._wake_up_loop.idle = not batch_processor.has_pending_requests()
        before, begin = self.current_batch, time.perf_counter()
        try:
            goes_on = bool(super()._generation_loop_body(batch_processor, bootstrapping))
            if self.current_batch != before:
                self._admission.stepped(time.perf_counter() - begin)
            return goes_on
        except EaasError as error:
            _LOG.warning("a batch failed: %s", error)
            batch_processor.handle_batch_error(error)
            return True

    def join(self, *arguments: Any, **options: Any) -> None:
        self._wake_up_loop.set()
        super().join(*arguments, **options)

    def _handle_critical_error(self, error: Exception, batch_processor: Any) -> None:
        super()._handle_critical_error(error, batch_processor)
        self.output_router.fail_all(error)


class _Bell(threading.Event):
    """Wakes the generation thread, which waits for a tenth of a second at most.

    Where there is no request, only a new one gives it work, and that rings: it may sleep for longer.
    After the first such sleep memory is given back.
    """

    idle = False
    _is_trimmed = False

    def wait(self, timeout: float | None = None) -> bool:
        if not self.idle:
            self._is_trimmed = False
            return super().wait(timeout)
        rang = super().wait(_IDLE_S)
        if not rang and not self._is_trimmed:
            trim_heap()
            self._is_trimmed = True
        return rang


class _ReachedError(Exception):
    """The probe got as far as it had to."""


def fits_paged_cache(manager: Any) -> bool:
    """Whether the model's attention reads and writes the paged cache.

    Runs one token up to the end of the first attention module, so no expert is needed, and looks
    whether the keys went into the cache. Latent attention, whose keys and values differ in size,
    fails on the way.
    """
    processor = manager.batch_processor
    cache = processor.cache.cache_tensor  # bytes
    untouched = 255  # not 0: the keys of a padding token may all be 0
    cache.fill_(untouched)
    written = False

    def stop_here(*_: Any) -> None:
        nonlocal written
        written = int(cache.min()) < untouched
        raise _ReachedError

    attention = next(
        (m for m in manager.model.modules() if type(m).__name__.endswith("Attention")), None
    )
    if attention is None:
        return False
    hook = attention.register_forward_hook(stop_here)
    try:
        # It catches whatever the forward pass raises and gives the blocks back.
        with torch.no_grad():
            processor.model_runner.run_one_warmup(manager.model, num_q_tokens=1, max_kv_read=0)
    finally:
        hook.remove()
    cache.zero_()
    return written


class BatchingEngine:
    """Continuous batching over a paged key-value cache (`Engine`).

    Raises ValueError or another error of transformers for a model that has no paged attention, and
    ConfigError if the cache needs more memory than there is.

    Args:
        model: A transformers causal language model.
        limits: Sizes of cache and batch.
        admission: Says who goes into the batch.
        witness: Sees which servers compute what.
    """

    def __init__(
        self, model: Any, limits: ServeLimits, admission: LiveAdmission, witness: Witness
    ) -> None:
        self.manager = _Manager(model, limits, admission, witness)
        self._admission = admission
        self._stopping = threading.Lock()
        self._stopped = False
        try:
            self.manager.warmup()  # creates the cache; captures nothing without graphs
        except MemoryError as error:
            raise ConfigError(
                f"the key-value cache of {limits.num_blocks} blocks of {limits.page_size} tokens "
                f"does not fit into memory ({error}): make it smaller"
            ) from error
        self._capacity = int(infer_max_single_request_tokens(self.manager.batch_processor.cache))

    @property
    def capacity(self) -> int | None:
        """Most tokens of one request: what it may fill with the cache to itself."""
        return self._capacity

    def start(self) -> None:
        """Starts the thread."""
        self.manager.start()

    def submit(self, work: Work, deliver: Callable[[Delivery], None]) -> None:
        """Queues a request. Raises CBWorkerDeadError."""
        router = self.manager.output_router
        router.listen(work.id, deliver, work.servers)
        queued = self.manager.add_request(
            work.prompt,
            request_id=work.id,
            max_new_tokens=work.max_tokens,
            streaming=True,
            eos_token_id=list(work.end_tokens),
            sampling=work.sampling,
        )
        if queued is None:
            router.forget(work.id)
            raise CBWorkerDeadError(f"The engine has stopped: {self.failure()}")

    def cancel(self, request_id: str) -> None:
        """Frees the request's place in batch and cache before the next forward pass."""
        if self.manager.output_router.forget(request_id):
            self.manager.cancel_request(request_id)

    def failure(self) -> str | None:
        """Why nothing is generated any more, or None."""
        status = self.manager.background_thread_status
        if status.fatal_error is not None:
            return f"{type(status.fatal_error).__name__}: {status.fatal_error}"
        if status.local_status != BackgroundThreadStatus.DONT_STOP:
            return "it was told to stop"
        return None

    def running(self) -> int:
        """Requests in the running batch."""
        processor = self.manager.batch_processor
        return 0 if processor is None else len(processor.scheduler.active_requests)

    def waiting(self) -> int:
        """Requests that wait for the batch."""
        processor = self.manager.batch_processor
        pending = 0 if processor is None else len(processor.scheduler.waiting_requests)
        return pending + int(self.manager.input_queue.qsize())

    def in_batch(self) -> Iterable[str]:
        """Ids of the requests of the running forward pass."""
        requests = self.manager.batch_processor.inputs_and_outputs.requests_in_batch
        return [request.state.request_id for request in requests]

    def cache_usage(self) -> float:
        """Part of the key-value cache that requests use, 0 to 1.

        Blocks that are only kept in case a later prompt begins with the same text are free, as in vLLM.
        """
        processor = self.manager.batch_processor
        if processor is None:
            return 0.0
        cache, used = processor.cache, 0
        for allocator in cache.cache_allocators.values():
            # A copy, since the generation thread changes the tables. Requests share blocks.
            tables = list(allocator.block_table.values())
            used += len(set().union(*tables)) * allocator.bytes_per_block
        return float(used / (cache.num_sectors * cache.bytes_per_sector))

    def stop(self, timeout_s: float) -> None:
        """Ends the thread, and gives the model its attention implementation back."""
        error = CBWorkerDeadError("The server is stopping.")
        self.manager.output_router.fail_all(error)
        # The end of the grace period and the application's own end may come at once.
        with self._stopping:
            if not self._stopped:
                self._stopped = True
                self.manager.stop(block=True, timeout=timeout_s, hard_stop=True)
                self._admission.close()
        self.manager.output_router.fail_all(error)  # who came in between
