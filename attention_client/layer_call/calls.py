"""All layer calls of one client: compiled where possible, else by `LayerCall`; and their counts."""

from __future__ import annotations

import threading
import time
from typing import NamedTuple, Self

import numpy as np
import torch

from attention_client.connections.messages import LayerInput
from attention_client.exchange import Exchange
from attention_client.layer_call.call import LayerCall
from attention_client.layer_call.compiled import CompiledCalls, abandon, attempts_of
from attention_client.layer_call.shared import Dispatcher
from eaas.errors import ExpertsUnavailableError

__all__ = ["LayerCalls", "RemoteCall"]


class Arguments(NamedTuple):
    """Arguments of a layer call: those of `LayerCalls.start`."""

    layer: int
    x_TH: torch.Tensor
    ids_TK: torch.Tensor
    scores_TK: torch.Tensor
    wanted_T: torch.Tensor | None


class Counted(NamedTuple):
    """A `LayerCall` that counts as in flight.

    Attributes:
        call: The call.
        pairs: Its wanted (token, expert) pairs.
        began: Monotonic seconds.
    """

    call: LayerCall
    pairs: int
    began: float


class LayerCalls:
    """Makes the layer calls of one client and counts them. Thread-safe.

    Args:
        shared: State shared by all calls.
        checksum: Whether slots have checksums.
    """

    def __init__(self, shared: Dispatcher, checksum: bool) -> None:
        self.shared = shared
        self.compiled = CompiledCalls(shared, checksum)
        self._counting = threading.Lock()
        self._in_flight = 0
        self._finished = 0

    @property
    def in_flight(self) -> int:
        """Calls that have begun and not ended."""
        return self._in_flight + self.compiled.running

    @property
    def finished(self) -> int:
        """Calls that have ended: the progress that the client reports."""
        self.compiled.read()
        return self._finished + self.compiled.finished

    def run(
        self,
        layer: int,
        x_TH: torch.Tensor,
        ids_TK: torch.Tensor,
        scores_TK: torch.Tensor,
        wanted_T: torch.Tensor | None,
    ) -> torch.Tensor:
        """Make a layer call and wait for its result: `start` and `finish` in one, with less overhead."""
        timeout_s = self.shared.timeout_s
        sent = self.compiled.start(layer, x_TH, ids_TK, scores_TK, wanted_T, timeout_s)
        if sent is not None:
            try:
                out_TH = self.shared.finish(sent)
            except BaseException:
                abandon(sent)
                raise
            if out_TH is not None:
                return out_TH
        arguments = Arguments(layer, x_TH, ids_TK, scores_TK, wanted_T)
        return RemoteCall(self, arguments, sent, overlapped=False).finish_slowly()

    def start(
        self,
        layer: int,
        x_TH: torch.Tensor,
        ids_TK: torch.Tensor,
        scores_TK: torch.Tensor,
        wanted_T: torch.Tensor | None,
    ) -> RemoteCall:
        """Send a layer call's requests; `finish` of the result returns the sum.

        Args:
            layer: MoE layer.
            x_TH: Hidden states in fp32, bf16 or fp16. This tensor and the next two must not change before
                the end of the call.
            ids_TK: Logical expert ids.
            scores_TK: Weights of the experts.
            wanted_T: bool; tokens to compute, others give 0. None: all.

        Raises:
            WrongRequestError: The hidden states are not of the model's size.
        """
        arguments = Arguments(layer, x_TH, ids_TK, scores_TK, wanted_T)
        sent = self.compiled.start(*arguments, self.shared.timeout_s)
        return RemoteCall(self, arguments, sent, overlapped=True)

    def begin(self, arguments: Arguments) -> Counted:
        """Make a `LayerCall` and count it as in flight; `end` must follow."""
        layer, x_TH, ids_TK, scores_TK, wanted_T = arguments
        ids = ids_TK.to(torch.int64).contiguous().numpy()
        wanted_TK = np.ones(ids.shape, dtype=np.bool_)
        if wanted_T is not None:
            wanted_TK &= wanted_T.numpy()[:, None]
        inputs = LayerInput.of(layer, x_TH.contiguous(), scores_TK.to(torch.float32).numpy())
        call = LayerCall(self.shared, inputs, ids, wanted_TK)
        with self._counting:
            self._in_flight += 1
        return Counted(call, int(np.count_nonzero(wanted_TK)), time.monotonic())

    def end(self, counted: Counted) -> None:
        """Count the end of a call, for the metrics and for the progress reported to the monitor."""
        counted.call.cancel()
        with self._counting:
            self._in_flight -= 1
            self._finished += 1
        metrics = self.shared.metrics
        metrics.layer_calls.inc()
        metrics.pairs.inc(counted.pairs)
        metrics.layer_call_seconds.observe(time.monotonic() - counted.began)


class RemoteCall:
    """One layer call that `LayerCalls.start` has begun. Ends with `finish` or `cancel`, or as a context.

    Args:
        calls: All calls of the client.
        arguments: Arguments of the call.
        sent: What compiled code has sent; None: nothing.
        overlapped: Whether the caller computes before `finish`.
    """

    def __init__(
        self, calls: LayerCalls, arguments: Arguments, sent: Exchange | None, *, overlapped: bool
    ) -> None:
        self._calls = calls
        self._arguments = arguments
        self._sent = sent
        self._deadline = calls.shared.clock() + calls.shared.timeout_s
        self._counted: Counted | None = None
        if sent is None and overlapped:
            self._counted = calls.begin(arguments)
            try:
                self._counted.call.start()
            except BaseException:
                self.cancel()
                raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def finish(self) -> torch.Tensor:
        """Wait for the servers' answers, and resend to other replicas what fails.

        Returns:
            (T, H) in the dtype of the hidden states; the servers' parts are added in float32.

        Raises:
            ExpertsUnavailableError: No live replica answered before the deadline.
            WrongRequestError: A server refused the request.
        """
        if self._sent is not None:
            try:
                out_TH = self._calls.shared.finish(self._sent)
            except BaseException:
                self.cancel()
                raise
            if out_TH is not None:
                self._sent = None
                return out_TH
        return self.finish_slowly()

    def finish_slowly(self) -> torch.Tensor:
        """Let a `LayerCall` do what compiled code did not. Returns and raises as `finish`."""
        try:
            return self._finish_in_python().to(self._arguments.x_TH.dtype)
        except ExpertsUnavailableError:
            self._calls.shared.metrics.unavailable.inc()
            raise
        finally:
            self.cancel()

    def cancel(self) -> None:
        """End the call: abandon its requests in flight. Idempotent."""
        sent, self._sent = self._sent, None
        if sent is not None:
            abandon(sent)
        if self._counted is not None:
            counted, self._counted = self._counted, None
            self._calls.end(counted)

    def _finish_in_python(self) -> torch.Tensor:
        if self._counted is None:
            self._counted = self._calls.begin(self._arguments)
            sent, self._sent = self._sent, None
            # Nothing is left to take over if a slot was lost during the sum.
            attempts = [] if sent is None else attempts_of(sent)
            if not attempts:
                return self._counted.call.run()
            # A failure must come after the answers of the calls before, or it counts as the first.
            self._calls.compiled.read()
            self._counted.call.take_over(attempts, self._deadline)
        return self._counted.call.finish()
