from array import array

from _typeshed import WriteableBuffer

from eaas.wire.slot import SlotLimits

# Requests, seconds and most seconds per token; then of the last request: slot (-1: none), layer, tokens, and
# when it was seen and answered.
Served = tuple[int, float, float, int, int, int, float, float]

class Direct:
    """Answers requests in their slots, in compiled code (slots.h). One caller at a time.

    Attributes:
        answered: Requests answered so far; a client that has its answer finds it counted.
        doing: What `serve` does: monotonic seconds since when, and the tokens of the batch. 0 tokens: it
            waits, and the seconds are those of the end of the wait.
    """

    answered: int
    doing: tuple[float, int]

    def __new__(
        cls,
        buffer: WriteableBuffer,
        count: int,
        offsets: tuple[int, int, int],
        strides: tuple[int, int],
        limits: SlotLimits,
        layers: list[object | None],
        owners: tuple[bytearray, array[int], array[int], array[int]],
    ) -> Direct:
        """Map an arena's slots, without changing them.

        Args:
            buffer: The arena's bytes.
            count: Number of slots.
            offsets: Offsets of flag 0, bell 0 and slot 0.
            strides: Bytes of a slot's request and of its result.
            limits: The server's limits.
            layers: The kernel's `ExpertKernel.direct`; the kernel may replace its items at any time.
            owners: The slots' owners: `SlotTable.owners`.

        Raises:
            ValueError: The slots exceed the buffer, or are not aligned to 64 bytes.
        """

    def accept(self, slot: int, generation: int, /) -> tuple[int, int] | None:
        """Copy and validate the request in a claimed slot of this generation, for `answer`.

        Returns:
            Its layer and tokens. None: the ordinary path must look at it (it is invalid, unusual, or gone).
        """

    def answer(self, bell: int, seen_at: float, /) -> float | None:
        """Compute the accepted request into its slot, and hand the slot to its client, whose bell rings.

        The answer to a slot that was revoked is dropped. The GIL is released.

        Args:
            bell: The grant's doorbell.
            seen_at: When the server first saw the request, in monotonic seconds.

        Returns:
            When it ended, in monotonic seconds. None: nothing was answered, as the kernel cannot do it (an
            expert is not held, or the batch is large).

        Raises:
            ValueError: No request is accepted, or after `release`.
        """

    def serve(self, spin_us: int, idle_us: int, most_us: int, once: bool, /) -> Served:
        """Wait for a request, answer it, and so on, while each is the only one, and plain. Releases the GIL.

        Args:
            spin_us: How long to poll before sleeping.
            idle_us: Return after so long without a request.
            most_us: Return so long after the first request.
            once: Return after one request.

        Returns:
            What it answered; the ordinary path looks for the requests that it left. Also returns soon after
            `leave` or an interrupt of the doorbell.
        """

    def leave(self) -> None:
        """Make `serve` return after the current request; if it is not running, its next call returns at once.

        Safe from any thread. To end its sleep, interrupt the doorbell afterwards.
        """

    def release(self) -> None:
        """Drop the buffer, so that the arena's memory can be freed. Idempotent."""
