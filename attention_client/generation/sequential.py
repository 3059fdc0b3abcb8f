"""The attention client's engine for models without paged attention: it runs one request at a time."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from transformers import GenerationConfig

from attention_client.engines.transformers.rotary import length_rotaries, of_prompts
from attention_client.generation.sampling import SequenceSampler
from attention_client.generation.scores import score
from attention_client.layer_call.expert_attribution import ExpertAttribution, SeenServers
from eaas.generation.errors import EngineStoppedError
from eaas.generation.scores import Scores
from eaas.generation.work import NOBODY, Delivery, Work

__all__ = ["SequentialEngine"]

_PART = 256  # tokens of a prompt that are scored at a time


class _CancelledError(Exception):
    """Ends the forward passes of a cancelled request."""


class _Job:
    """One queued or running request; also the streamer of ``model.generate``."""

    def __init__(self, work: Work, deliver: Callable[[Delivery], None]) -> None:
        self.work = work
        self.sampler = SequenceSampler(work)
        self.prompt_scores: Scores | None = None
        self.cancelled = threading.Event()
        self._deliver = deliver
        self._loop = asyncio.get_running_loop()
        self._submitted = perf_counter()
        self._prompt_seen = False
        # The servers of the tokens, if the request asked for them.
        self.seen: SeenServers | None = None

    def send(self, tokens: list[int], *, finished: bool, error: Exception | None = None) -> None:
        if not self.cancelled.is_set():
            servers = self.seen.take_last() if self.seen is not None else NOBODY
            scores = self.sampler.take_scores() if tokens else None
            prompt_scores, self.prompt_scores = self.prompt_scores, None
            self._call(Delivery(tokens, finished, error, 0.0, servers, scores, prompt_scores))

    def begin(self) -> None:
        self._call(Delivery([], queued_s=perf_counter() - self._submitted))

    def put(self, value: torch.Tensor) -> None:
        if self.cancelled.is_set():
            raise _CancelledError
        if self._prompt_seen:
            self.send(value.tolist(), finished=False)
        self._prompt_seen = True  # the first call passes the prompt

    def end(self) -> None:
        self.send([], finished=True)

    def _call(self, delivery: Delivery) -> None:
        self._loop.call_soon_threadsafe(self._deliver, delivery)


class SequentialEngine:
    """Engine that runs ``model.generate`` for each request in turn (`Engine`)."""

    def __init__(self, model: Any, attribution: ExpertAttribution) -> None:
        self._attribution = attribution
        self._model = model.eval()
        # `generate` would take what a request leaves open from here; a request has all settings itself.
        model.generation_config = GenerationConfig()
        self._rotaries = length_rotaries(model)
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._jobs: dict[str, _Job] = {}
        self._current: Work | None = None
        self._stopped = False

    @property
    def capacity(self) -> int | None:
        """Most tokens of one request: None, since its cache has no limit."""
        return None

    def start(self) -> None:
        """Start the thread that generates; as a daemon, it does not keep the process alive."""
        threading.Thread(target=self._run_all, name="generation", daemon=True).start()

    def submit(self, work: Work, deliver: Callable[[Delivery], None]) -> None:
        """Queue a request behind all earlier ones. Raises EngineStoppedError if the engine has stopped."""
        if self._stopped:
            raise EngineStoppedError("The server is stopping.")
        job = self._jobs[work.id] = _Job(work, deliver)
        self._queue.put(job)

    def cancel(self, request_id: str) -> None:
        """End the request at its next token, or before it begins; nothing more is delivered."""
        job = self._jobs.pop(request_id, None)
        if job is not None:
            job.cancelled.set()

    def failure(self) -> str | None:
        """Return why the engine takes no more requests; None: it runs. A failed request does not stop it."""
        return "it was shut down" if self._stopped else None

    def running(self) -> int:
        """Number of running requests, 0 or 1, for the metrics."""
        return int(self._current is not None)

    def waiting(self) -> int:
        """Number of requests that wait for the running one to end, for the metrics."""
        return max(0, len(self._jobs) - self.running())

    def traced(self) -> list[bytes]:
        """Return the trace of the running request, if it has one, for those of its layers."""
        return [self._current.trace] if self._current is not None and self._current.trace else []

    def cache_usage(self) -> float:
        """Fraction of the key-value cache in use: 0, since each request has its own cache without a limit."""
        return 0.0

    def is_compiled(self) -> bool:
        """Whether forward passes run in compiled code: never."""
        return False

    def stop(self, timeout_s: float) -> None:
        """Fail all requests and refuse new ones; the running one ends at its next token."""
        self._stopped = True
        for job in list(self._jobs.values()):
            error = EngineStoppedError("The server is stopping.")
            job.send([], finished=True, error=error)
            self.cancel(job.work.id)
        self._queue.put(None)

    def _run_all(self) -> None:
        while (job := self._queue.get()) is not None:
            self._run(job)

    def _run(self, job: _Job) -> None:
        """Generate one request's answer; the job delivers each token."""
        if job.cancelled.is_set():
            return
        work = job.work
        self._current = work
        job.begin()
        tokens_1T = torch.tensor([work.tokens], device=self._model.device)
        for rotary in self._rotaries:
            rotary.forget()
        config = GenerationConfig(
            max_new_tokens=work.max_tokens - (len(work.tokens) - work.prompt_length),
            do_sample=False,  # the sampler leaves one token to choose
            # -1 matches no token; None would select the model's own end tokens.
            eos_token_id=list(work.end_tokens) or -1,
            pad_token_id=0,
        )
        try:
            if work.sampling.prompt_logprobs:
                prompt_1T = tokens_1T[:, : work.prompt_length]
                job.prompt_scores = self._score_prompt(job, prompt_1T)
            with self._attribution.watching(work.servers) as job.seen:
                self._model.generate(
                    tokens_1T,
                    attention_mask=torch.ones_like(tokens_1T),
                    generation_config=config,
                    logits_processor=[job.sampler],
                    streamer=job,
                )
        except _CancelledError:
            pass
        except Exception as error:  # noqa: BLE001 (delivered to the request)
            job.send([], finished=True, error=error)
        finally:
            self._current = None
            self._jobs.pop(work.id, None)

    @torch.no_grad()
    def _score_prompt(self, job: _Job, prompt_1T: torch.Tensor) -> Scores:
        """Score a prompt's tokens in parts, in forward passes of their own. The first token has no score."""
        top = job.work.sampling.logprobs or 0
        scores, cache = [Scores.none(top)], None
        for begin in range(0, prompt_1T.shape[1] - 1, _PART):
            if job.cancelled.is_set():
                raise _CancelledError
            part_1T = prompt_1T[:, begin : begin + _PART]
            with of_prompts(torch.tensor([prompt_1T.shape[1]])):
                output = self._model(part_1T, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            next_T = prompt_1T[0, begin + 1 : begin + _PART + 1]
            scores.append(score(output.logits[0, : len(next_T)], next_T, top))
        return Scores.joined(scores)
