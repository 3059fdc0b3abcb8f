from collections.abc import Sequence
from mmap import mmap

import numpy as np
import numpy.typing as npt
import torch

_Float32 = npt.NDArray[np.float32]
_Int32 = npt.NDArray[np.int32]
_Float64 = npt.NDArray[np.float64]

reads_tensors: int
"""Whether this torch has DLPack's C exchange interface, without which `Route.start` sends nothing."""

class Lane:
    """The client's slots on one server: which are free, and their memory. Thread-safe."""

    def __new__(
        cls,
        buffer: mmap,
        flags_offset: int,
        bells_offset: int,
        generations_offset: int,
        slots_offset: int,
        request_stride: int,
        result_stride: int,
        first_slot: int,
        slots: int,
        payload_capacity: int,
        result_capacity: int,
        reply_bell: int,
        doorbell: int,
        generation: int,
        hidden: int,
        direct: bool,
    ) -> Lane:
        """Map the slots. `direct`: the server polls this memory and hears its doorbell; else no exchange
        uses the lane.

        Raises:
            ValueError: The slots do not lie in the buffer.
        """
    free: int
    """Number of free slots."""
    work: float
    """Work in flight (`dispatch.parts.Part.work`)."""
    users: int
    """Requests of exchanges: in flight, or handed over and without an owner yet (`leave`)."""
    writers: int
    """Exchanges that write a request now."""
    abandoned: int
    """Requests that nobody waits for and the server has not answered; routes stay away meanwhile."""

    def take(self) -> int:
        """Take a free slot; -1 if there is none."""

    def give(self, slot: int, /) -> None:
        """Give a slot back."""

    def add_work(self, work: float, /) -> None:
        """Change the work in flight."""

    def set_times(self, expected: _Float64, tail: float, /) -> None:
        """Set the usual seconds of a request by bit length of its tokens (32; 0: unknown), and the multiple
        after which it is hedged (0: never)."""

    def leave(self) -> None:
        """Note that a request of `Exchange.requests` has an owner: the memory may then be dropped."""

    def stop(self) -> None:
        """Refuse new exchanges, and end the waits of running ones at the next ring of the reply bell."""

    def release(self) -> None:
        """Stop, and drop the memory once no exchange uses it."""

class Exchange:
    """The requests of one layer call, in flight."""

    view: object
    """The view of its route."""
    top_k: int
    """Experts of a token."""

    def finish(self) -> torch.Tensor | None:
        """Wait for the answers, sum them in float32 and free the slots.

        Returns:
            (T, H) in the dtype of the hidden states. None: an answer is late, lost or not a result, or a
            slot was lost during the sum; `requests` returns what is left to wait for.
        """

    def requests(
        self,
    ) -> list[tuple[int, int, int, bytes, bytes, float, float, float, float]]:
        """Hand over what is in flight; the exchange is over. Call `Lane.leave` once for each request.

        Returns:
            (server, slot, request id, tokens as int64, experts as int32, work, sent at, hedge at, expires at)
            of each request; times are monotonic seconds.
        """

class Route:
    """The servers of one placement: chooses and sends, as `DispatchPolicy` does."""

    def __new__(
        cls,
        view: object,
        lanes: Sequence[Lane | None],
        firsts: _Int32,
        held_by: _Int32,
        shares: _Float32,
        layers: int,
        experts: int,
        levels: bool,
        least_s: float,
    ) -> Route:
        """Use these replicas: the arrays of `eaas.replicas.Replicas`, on servers with a lane.

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
        /,
    ) -> Exchange | None:
        """Send a layer call's requests: (T, H), (T, K), (T, K), bool (T) or None for all tokens.

        The tensors must not change until the call ends.

        Returns:
            None if the call is not of the common case (a tensor that is strided, on a device or of another
            dtype, no free slot, an expert without a server, a server whose times are unknown or that owes an
            answer, ...); nothing was sent then.
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
