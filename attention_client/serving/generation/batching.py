"""The attention client's usual engine: transformers' continuous batching, changed for serving.

The changes to transformers 5.23:

- An expected error of the model (`EaasError`) fails the requests of its batch. In transformers any
  exception ends the worker thread.
- A full cache does not block new requests after the last running one was cancelled.
- A request gets its listener before it enters the queue. In transformers a fast request can finish
  before anyone listens.
- Output without a listener is dropped. In transformers it stays in memory.
- Every waiting request fails if the worker dies, even one between two queues.
- Each request has its own sampling settings, and may follow a grammar (`sampling.py`).
- On CPUs, attention reads the cache through block tables (`engines/transformers/paged`). In transformers each
  query is computed against all sequences' keys.
- A request may get the log-probabilities of its tokens and of its prompt (`prompt_scoring.py`).
- Rotary frequencies that depend on a request's length are its own (`rotary.py`). In transformers the longest
  request of a pass decides.
- A strategy chooses which waiting requests enter the batch (`strategy_scheduler.py`).
- The idle thread wakes up once a second, not ten times.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.cli.serving.utils import CBWorkerDeadError
from transformers.generation.continuous_batching.continuous_api import (
    BackgroundThreadStatus,
    ContinuousBatchingManager,
)
from transformers.generation.continuous_batching.model_runner import infer_max_single_request_tokens

from attention_client.engines.transformers.model import count_passes, remote_experts
from attention_client.engines.transformers.paged.batch import PagedBatch
from attention_client.engines.transformers.paged.cache_size import (
    UntouchedZeros,
    blocks_that_fit,
    sized_already,
)
from attention_client.engines.transformers.paged.latent import LatentSizes, sized_for_latents
from attention_client.engines.transformers.paged.model import PagedModel, Pass, use_paged_attention
from attention_client.engines.transformers.rotary import (
    length_rotaries,
    of_prompts,
    prompts_of,
    refuse_new_keys,
    share_equal_blocks,
)
from attention_client.heap import trim_heap
from attention_client.layer_call.expert_attribution import ExpertAttribution
from attention_client.serving.api_error import ApiError
from attention_client.serving.generation.engine import Delivery, Work
from attention_client.serving.generation.live_admission import LiveAdmission
from attention_client.serving.generation.prompt_scoring import PromptScoring, unscored_rows
from attention_client.serving.generation.router import Router
from attention_client.serving.generation.sampling import BatchSampler
from attention_client.serving.generation.strategy_scheduler import StrategyScheduler
from attention_client.serving.limits import ServeLimits
from eaas.checkpoint.lean_import import without_compiler
from eaas.errors import ConfigError, EaasError

__all__ = ["BatchingEngine", "fits_paged_cache"]

_LOG = logging.getLogger(__name__)
_IDLE_S = 1.0
# Longest wait for the error of a stopped generation thread, and its interval.
_ERROR_S, _ERROR_POLL_S = 1.0, 0.001
# transformers' masks grow with the cache.
_MASKED_BLOCKS = 64


class _Manager(ContinuousBatchingManager):  # type: ignore[misc]
    """transformers' batching manager with the changes that the module lists."""

    def __init__(
        self,
        model: Any,
        limits: ServeLimits,
        admission: LiveAdmission,
        attribution: ExpertAttribution,
        is_paged: bool,
    ) -> None:
        self._admission, self._attribution = admission, attribution
        self._is_paged = is_paged
        self._attention_threads = limits.attention_threads
        refuse_new_keys(model)
        self._rotaries = length_rotaries(model)
        before: str | None = None
        self._latent: LatentSizes | None = None
        if is_paged:
            before, self._latent = use_paged_attention(model)
        num_blocks = limits.num_blocks or _MASKED_BLOCKS
        if is_paged:
            num_blocks = _num_blocks(model, limits, self._latent)
        super().__init__(
            model=model,
            # Greedy: the sampler below leaves one token to choose. No end token: each request has its own.
            generation_config=GenerationConfig(do_sample=False, eos_token_id=-1),
            continuous_batching_config=ContinuousBatchingConfig(
                num_blocks=num_blocks,
                page_size=limits.page_size,
                max_batch_tokens=limits.max_batch_tokens,
                # A forward pass that waits for remote experts cannot be captured as a graph or prepared
                # ahead.
                use_cuda_graph=False,
                use_async_batching=False,
                # The loader chose the attention; a switch here may download kernels.
                auto_switch_to_flash=False,
            ),
        )
        # transformers restores it at the end.
        if before is not None:
            self._original_attn_impl = before
        self.output_router = Router()
        self._wake_up_loop = _Doorbell()
        processors = self.logit_processor
        self._sampler = BatchSampler(self._fail_one)
        processors.logits_processor.append(self._sampler)
        processors.tensors_required += 1
        processors.do_processing = True
        processors._retrieve_processors_kwargs()
        # What runs at each step: the model, or a `PagedModel` of it.
        self.stepped: Any = model

    def _fail_one(self, request_id: str, error: ApiError) -> None:
        self.output_router.fail(request_id, error)
        self.cancel_request(request_id)

    def start(self) -> None:
        """Start the generation thread; as a daemon, it does not keep the process alive if a pass is stuck."""
        self.background_thread_status.clear()
        self._generation_thread = threading.Thread(
            target=self._run_generation_loop, name="generation", daemon=True
        )
        self._generation_thread.start()

    def _create_batch_processor(self) -> Any:
        with (
            without_compiler(),
            UntouchedZeros(),
            sized_already() if self._is_paged else nullcontext(),
            sized_for_latents(self.model.config.get_text_config(), self._latent),
        ):
            try:
                processor = super()._create_batch_processor()
            except (AttributeError, NotImplementedError) as error:
                # transformers raises these, too, for an attention that has no paged form.
                raise ValueError(str(error)) from error
        # transformers creates the processor once and resets it later.
        if not isinstance(processor.scheduler, StrategyScheduler):
            scheduler = StrategyScheduler(processor.scheduler, self._admission)
            processor.scheduler = processor.offloading_manager.scheduler = scheduler
            if self._rotaries:
                longest = min(rotary.longest for rotary in self._rotaries)
                share_equal_blocks(processor.cache, longest)
                _LOG.info(
                    "requests of more than %d tokens share no blocks of the key-value cache: "
                    "their rotary frequencies depend on their length",
                    longest,
                )
            if self._is_paged:
                self._page(processor)
        return processor

    def _page(self, processor: Any) -> None:
        """Let a new processor prepare its batches for `PagedModel`."""
        batch = PagedBatch(
            processor.cache,
            processor.config,
            processor.cb_config,
            processor.model_device,
            processor.model_dtype,
            processor.logit_processor,
        )
        processor.inputs_and_outputs = processor.model_runner.inputs_and_outputs = batch
        # transformers' budget of tokens read at a step is the size of its index lists.
        processor.cache.max_tokens_read = sys.maxsize
        model = self.model
        self.stepped = PagedModel(
            model,
            processor.cache,
            batch,
            remote_experts(model),
            count_passes(model),
            self._attention_threads,
            self._latent,
        )

    def _generation_step(self) -> None:
        outputs = self.batch_processor.inputs_and_outputs
        router = self.output_router
        with (
            self._admission.watching(lambda: outputs.requests_in_batch),
            self._attribution.watching(router.asks_for_servers) as seen,
            of_prompts(prompts_of(outputs.requests_in_batch)) if self._rotaries else nullcontext(),
        ):
            batch, model = outputs.requests_in_batch, self.stepped
            parts = unscored_rows(batch, router.scored) if router.scores_prompts else []
            if parts:
                model = PromptScoring(model, parts, router.note_prompt_scores)
            self.batch_processor._generation_step(model)
        router.note_scores(self._sampler.take_scores())
        if seen is not None:
            router.note_servers(outputs.requests_in_batch, seen)

    def _generation_loop_body(self, batch_processor: Any, bootstrapping: bool) -> bool:
        scheduler = batch_processor.scheduler
        if not scheduler.active_requests:
            # A full cache sets this. transformers clears it only when a request completes, not when the
            # last one fails or is cancelled.
            scheduler.block_new_requests = False
        self._wake_up_loop.idle = not batch_processor.has_pending_requests()
        before, begin = self.current_batch, time.perf_counter()
        try:
            goes_on = bool(super()._generation_loop_body(batch_processor, bootstrapping))
            if self.current_batch != before:
                seconds = time.perf_counter() - begin
                self._admission.stepped(seconds)
                scheduler.stepped(seconds)
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


def _num_blocks(model: Any, limits: ServeLimits, latent: LatentSizes | None) -> int:
    config = model.config.get_text_config()
    with sized_for_latents(config, latent):
        return blocks_that_fit(config, model.dtype, limits.page_size, limits.num_blocks)


class _Doorbell(threading.Event):
    """Event that wakes the generation thread, which itself waits at most 0.1 s.

    An idle thread waits longer, because only a new request gives it work, and a new request sets the event.
    After the first idle wait, free memory is returned to the system.
    """

    idle = False
    _is_trimmed = False

    def wait(self, timeout: float | None = None) -> bool:
        if not self.idle:
            self._is_trimmed = False
            return super().wait(timeout)
        is_set = super().wait(_IDLE_S)
        if not is_set and not self._is_trimmed:
            trim_heap()
            self._is_trimmed = True
        return is_set


class _ReachedError(Exception):
    """Ends the forward pass of `fits_paged_cache` after the first attention module."""


def fits_paged_cache(manager: _Manager) -> bool:
    """Whether the model's attention uses the paged cache, tested at start; else `SequentialEngine` serves it.

    Runs one token through the first attention module, which needs no expert. Latent attention fits only
    `PagedModel`; in transformers' own, whose keys and values have one size, it fails earlier.
    """
    processor = manager.batch_processor
    cache, update = processor.cache, processor.cache.update
    used = False

    def watched_update(*args: Any, **kwargs: Any) -> Any:
        nonlocal used
        found = update(*args, **kwargs)
        used = True
        return found

    def stop_here(*_: Any) -> None:
        raise _ReachedError

    attention = next(
        (m for m in manager.model.modules() if type(m).__name__.endswith("Attention")), None
    )
    if attention is None:
        return False
    cache.update = watched_update
    hook = attention.register_forward_hook(stop_here)
    try:
        # The call catches every exception of the forward pass and frees the blocks.
        with torch.no_grad():
            processor.model_runner.run_one_warmup(manager.stepped, num_q_tokens=1, max_kv_read=0)
    finally:
        hook.remove()
        del cache.update
    return used or (isinstance(manager.stepped, PagedModel) and manager.stepped.attended)


class BatchingEngine:
    """Engine that runs many requests in one batch, over a paged key-value cache (`Engine`).

    Args:
        model: A transformers causal language model.
        limits: Sizes of cache and batch.
        admission: Chooses the requests that enter the batch.
        attribution: Records which servers compute a token's experts.
        is_paged: Whether `PagedModel` runs the passes, else the model over transformers' own attention.

    Raises:
        ConfigError: The cache does not fit into memory.
        ValueError: The model has no paged attention.
    """

    def __init__(
        self,
        model: Any,
        limits: ServeLimits,
        admission: LiveAdmission,
        attribution: ExpertAttribution,
        *,
        is_paged: bool,
    ) -> None:
        self._admission = admission
        self._stopping = threading.Lock()
        self._stopped = False
        try:
            self.manager = _Manager(model, limits, admission, attribution, is_paged)
            self.manager.warmup()  # creates the cache; captures nothing without graphs
        except MemoryError as error:
            raise ConfigError(
                f"the key-value cache of {limits.num_blocks or 'at least 64'} blocks of "
                f"{limits.page_size} tokens does not fit into memory ({error}): "
                "lower attention_client.cache_blocks"
            ) from error
        self._capacity = int(infer_max_single_request_tokens(self.manager.batch_processor.cache))
        _LOG.info("the key-value cache holds %d tokens", self._capacity)

    @property
    def capacity(self) -> int | None:
        """Most tokens of one request, prompt plus answer: the whole cache. Longer requests are refused."""
        return self._capacity

    def use_compiled(self, compiled: Pass) -> None:
        """Run forward passes in compiled code from the next one on. Called by the thread that compiled it."""
        self.manager.stepped.compiled = compiled

    def is_compiled(self) -> bool:
        """Whether forward passes run in compiled code, for the metrics."""
        stepped = self.manager.stepped
        return isinstance(stepped, PagedModel) and stepped.compiled is not None

    def start(self) -> None:
        """Start the generation thread, which runs the batch. Called when the HTTP application starts."""
        self.manager.start()

    def submit(self, work: Work, deliver: Callable[[Delivery], None]) -> None:
        """Queue a request until the strategy admits it to the batch; `deliver` then gets its tokens.

        Raises CBWorkerDeadError if the engine has stopped.
        """
        router = self.manager.output_router
        sampling, guide = work.sampling.guided()
        router.listen(work, deliver)
        queued = self.manager.add_request(
            work.prompt,
            request_id=work.id,
            max_new_tokens=work.max_tokens,
            streaming=True,
            eos_token_id=list(work.end_tokens),
            sampling=sampling,
            **({} if guide is None else {"guide": guide}),
        )
        if queued is None:
            router.forget(work.id)
            raise CBWorkerDeadError(f"The engine has stopped: {self.failure()}")

    def cancel(self, request_id: str) -> None:
        """Remove a request from batch and cache before the next forward pass; no effect on a finished one."""
        if self.manager.output_router.forget(request_id):
            self.manager.cancel_request(request_id)

    def failure(self) -> str | None:
        """Return why the generation thread has stopped; then /health and new requests fail. None: it runs."""
        status = self.manager.background_thread_status
        # After an error, transformers stops first and records the error a moment later.
        until = time.monotonic() + _ERROR_S
        while (
            status.local_status == BackgroundThreadStatus.HARD_STOP
            and status.fatal_error is None
            and not self._stopped
            and time.monotonic() < until
        ):
            time.sleep(_ERROR_POLL_S)
        if status.fatal_error is not None:
            return f"{type(status.fatal_error).__name__}: {status.fatal_error}"
        if status.local_status != BackgroundThreadStatus.DONT_STOP:
            return "it was shut down"
        return None

    def running(self) -> int:
        """Number of requests in the running batch, for the metrics."""
        processor = self.manager.batch_processor
        return 0 if processor is None else len(processor.scheduler.active_requests)

    def waiting(self) -> int:
        """Number of requests that wait for a place in the batch, for the metrics."""
        processor = self.manager.batch_processor
        pending = 0 if processor is None else len(processor.scheduler.waiting_requests)
        return pending + int(self.manager.input_queue.qsize())

    def in_batch(self) -> Iterable[str]:
        """Return the ids of the requests in the running forward pass, for the traces of its layers."""
        requests = self.manager.batch_processor.inputs_and_outputs.requests_in_batch
        return [request.state.request_id for request in requests]

    def cache_usage(self) -> float:
        """Fraction of the key-value cache in use by requests, 0 to 1, for the metrics.

        As in vLLM, blocks kept only for prefix sharing count as free.
        """
        processor = self.manager.batch_processor
        if processor is None:
            return 0.0
        cache, used = processor.cache, 0
        for allocator in cache.cache_allocators.values():
            # A copy: the generation thread changes the tables. Requests share blocks.
            tables = list(allocator.block_table.values())
            used += len(set().union(*tables)) * allocator.bytes_per_block
        return float(used / (cache.num_sectors * cache.bytes_per_sector))

    def stop(self, timeout_s: float) -> None:
        """Fail all requests, end the generation thread and restore the model's attention implementation.

        Called when the endpoint stops; a second call only fails requests.
        """
        error = CBWorkerDeadError("The server is stopping.")
        self.manager.output_router.fail_all(error)
        # The end of the grace period and the end of the application may call this at the same time.
        with self._stopping:
            if not self._stopped:
                self._stopped = True
                self.manager.stop(block=True, timeout=timeout_s, hard_stop=True)
                self._admission.close()
        self.manager.output_router.fail_all(error)  # requests that arrived during the stop
