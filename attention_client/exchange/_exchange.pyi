from collections.abc import Sequence
from mmap import mmap
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_Float32 = npt.NDArray[np.float32]
_Int32 = npt.NDArray[np.int32]
_Int64 = npt.NDArray[np.int64]
_Float64 = npt.NDArray[np.float64]

reads_tensors: int
"""Whether this torch has DLPack's C exchange interface, without which `Route.start` sends nothing."""

AWAITED: int
REVOKED: int
WRONG: int
CAME: int
"""What `Slots.answer_of` finds."""

class Slots:
    """The client's slots on one server: which are free, their memory, and the verbs on them. Thread-safe.

    `write`, `hand_over`, `answer_of` and `free` are the steps of one request in this order (`slot.h`). They
    raise ValueError for a slot that is not the client's, and after `release`.
    """

    def __new__(
        cls,
        buffer: mmap,
        flags_offset: int,
        doorbells_offset: int,
        generations_offset: int,
        slots_offset: int,
        request_stride: int,
        result_stride: int,
        first_slot: int,
        slots: int,
        payload_capacity: int,
        result_capacity: int,
        reply_doorbell: int,
        doorbell: int,
        generation: int,
        hidden: int,
        direct: bool,
    ) -> Slots:
        """Map the slots. `direct`: the server polls this memory and hears its doorbell; else the caller of
        `Route.start` tells it of each request.

        Raises:
            ValueError: The slots do not lie in the buffer.
        """
    free_count: int
    """Number of free slots."""
    work: float
    """Work in flight (`dispatch.parts.Part.work`)."""
    users: int
    """Requests of exchanges: in flight, or handed over and without an owner yet (`leave`)."""
    writers: int
    """Exchanges that write a request now."""
    abandoned: int
    """Requests that nobody waits for and the server has not answered; routes stay away meanwhile."""

    def write(
        self,
        slot: int,
        request_id: int,
        flags: int,
        budget_us: int,
        epoch: int,
        layer: int,
        dtype: int,
        x: npt.NDArray[Any],
        scores: _Float32,
        top_k: int,
        rows: _Int64,
        ids: _Int32,
        /,
    ) -> bool:
        """Write a request into a free slot: (T, H), (T, K), the tokens (R) and their experts (R, K).

        Arrays are contiguous. Returns False, with nothing written, if the server took the slot back.

        Raises:
            ValueError: The arrays do not match, or the request does not fit the slot.
        """

    def hand_over(self, slot: int, /) -> bool:
        """Give a written slot to the server; the caller then tells it. False: it took the slot back."""

    def answer_of(self, slot: int, request_id: int, rows: int, /) -> tuple[int, bytes, str]:
        """Look for a request's answer.

        Returns:
            AWAITED: there is none yet. REVOKED: the server took the slot back. WRONG: it is no answer to this
            request; the last item says why. CAME: with the header of a result or refusal.
        """

    def free(self, slot: int, /) -> bool:
        """Free an answered slot for the client's next request (`give`). False: the server took it back, and
        what was read of the result may be wrong."""

    def take(self) -> int:
        """Take a free slot; -1 if there is none."""

    def give(self, slot: int, /) -> None:
        """Put a slot among the free ones."""

    def add_work(self, work: float, /) -> None:
        """Change the work in flight."""

    def set_times(self, expected: _Float64, tail: float, /) -> None:
        """Set the usual seconds of a request by bit length of its tokens (32; 0: unknown), and the multiple
        after which it is hedged (0: never)."""

    def leave(self) -> None:
        """Note that a request of `Exchange.requests` has an owner: the memory may then be dropped."""

    def stop(self) -> None:
        """Refuse new exchanges, and end the waits of running ones at the next ring of the reply doorbell."""

    def release(self) -> None:
        """Stop, and drop the memory once no exchange uses it."""

class Exchange:
    """The requests of one layer call, in flight.

    `finish`, `advance` and `collect` raise ValueError if the exchange is over, and they and `requests` while
    another thread is in one of them.
    """

    view: object
    """The view of its route."""
    top_k: int
    """Experts of a token."""
    sent: list[tuple[int, int]]
    """(server, slot) of each request that was handed over."""
    awaited: tuple[int, float] | None
    """Server of the first request without an answer, and when any of them is late (monotonic seconds)."""

    def finish(self) -> torch.Tensor | None:
        """Wait for the answers, sum them in float32 and free the slots: `advance` and `collect` with waits.

        Returns:
            (T, H) in the dtype of the hidden states. None: an answer is late, lost or not a result, or a
            slot was lost during the sum; `requests` returns what is left to wait for.
        """

    def advance(self, now: float, /) -> bool | None:
        """Look for the answers. True: all came. False: `finish` would return None. None: wait on."""

    def collect(self, now: float, /) -> torch.Tensor | None:
        """Sum the answers after `advance` has returned True. Returns as `finish`."""

    def requests(
        self,
    ) -> list[tuple[int, int, int, bytes, bytes, float, float, float, float]]:
        """Hand over what is in flight; the exchange is over. Call `Slots.leave` once for each request.

        Returns:
            (server, slot, request id, tokens as int64, experts as int32, work, sent at, hedge at, expires at)
            of each request; times are monotonic seconds.
        """

class Route:
    """The servers of one placement: chooses and sends, as `DispatchPolicy` does."""

    def __new__(
        cls,
        view: object,
        slots: Sequence[Slots | None],
        firsts: _Int32,
        held_by: _Int32,
        shares: _Float32,
        layers: int,
        experts: int,
        levels: bool,
        least_s: float,
    ) -> Route:
        """Use these replicas: the arrays of `eaas.replicas.Replicas`, on servers with slots.

        `view`: for `Exchange.view`. `least_s`: least seconds to wait for a server.

        Raises:
            ValueError: A size or a replica is out of range.
        """
    running: int
    """Exchanges that are not over."""
    waiting: int
    """Exchanges since the last `take`."""

    def start(
        self,
        layer: int,
        x: torch.Tensor,
        ids: torch.Tensor,
        scores: torch.Tensor,
        wanted: torch.Tensor | None,
        epoch: int,
        left_s: float,
        now: float,
        /,
    ) -> Exchange | None:
        """Send a layer call's requests: (T, H), (T, K), (T, K), bool (T) or None for all tokens.

        The tensors must not change until the call ends. `left_s` is what is left of the call's time at `now`.
        Servers whose slots are not `direct` must be told of their request (`Exchange.sent`).

        Returns:
            None if the call is not of the common case (a tensor that is strided, on a device or of another
            dtype, no free slot, 16 calls in flight, more tokens than the slots have room for, an expert
            without a server, a server whose times are unknown or that owes an answer, ...); nothing was
            sent then.
        """

    def set_load(self, rates: _Float64, queues: _Float64, load_pairs: float, /) -> None:
        """Set each server's seconds per unit of work, and its usual seconds until it begins a request."""

    def take(
        self,
    ) -> tuple[
        int,
        int,
        int,
        list[int],
        list[tuple[int, int, float, float, float, float, float]],
        list[float],
    ]:
        """Read and reset what happened since the last call.

        Returns:
            Exchanges, (token, expert) pairs, tokens with a NaN or infinite sum, answers of each server,
            samples (server, tokens, work, pairs, seconds seen by the client, seconds in the server, those of
            them for other requests), and seconds of the first exchanges.
        """
