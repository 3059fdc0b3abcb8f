from array import array

from _typeshed import WriteableBuffer

from eaas.wire._protocol import Fault
from eaas.wire.slot import SlotLimits

# Requests, seconds and most seconds per token; then of the last request: slot (-1: none), layer, tokens, and
# when it was seen and answered.
Served = tuple[int, float, float, int, int, int, float, float]

class Slots:
    """The server's verbs over its slots (slots.h), and the compiled turn for a lone client (serve.c).

    For the loop's thread; `leave` and the attributes are for any thread. A verb raises IndexError for a slot
    that does not exist. It raises ValueError after `close`, and if `accept` has found no such request there.

    Attributes:
        answered: Requests answered with a result so far; a client that has its answer finds it counted.
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
    ) -> Slots:
        """Map an arena's slots, without changing them.

        Args:
            buffer: The arena's bytes.
            count: Number of slots.
            offsets: Offsets of flag 0, doorbell 0 and slot 0.
            strides: Bytes of a slot's request and of its result.
            limits: The server's limits.
            layers: The kernel's `ExpertKernel.direct`; the kernel may replace its items at any time.
            owners: The slots' owners: `SlotTable.owners`.

        Raises:
            ValueError: The slots exceed the buffer, or are not aligned to 64 bytes.
        """

    def accept(self, slot: int, /) -> tuple[bytes, Fault | None] | None:
        """Claim a slot with a request, and validate a copy of its header; the slot's own may change later.

        Returns:
            The copy, and what is wrong with it, checksum apart (`_protocol.request_fault`).

            None: the slot was claimed before, has no request (any more), or has no owner; it is not claimed.
        """

    def compute(self, slot: int, /) -> bool:
        """Compute an accepted request from its slot into its slot, without the GIL.

        False: only a call of the kernel from Python can do it, or say why not. The layer is not compiled, an
        expert is not held, the hidden states are float16, or the batch is large. Nothing has changed but the
        result.
        """

    def write_answer(
        self, slot: int, status: int, detail: int, service_s: float, queue_s: float, /
    ) -> bytes | None:
        """Write the header of the answer to an accepted request, after its result, if it has one.

        Args:
            slot: Its slot.
            status: A `Status`; only OK has a result, and times.
            detail: `ResultHeader.detail`.
            service_s: Seconds since the server first saw the request.
            queue_s: Those of them that went to other requests.

        Returns:
            The header, if the request has a checksum, so that the caller must `seal` the answer.
        """

    def hand_over(self, slot: int, /) -> None:
        """Hand an answered slot to its client, and ring its doorbell; nothing, if it was revoked."""

    def release(self, slot: int, /) -> None:
        """End the claim of a slot, after it was handed over or if it was revoked: it may be granted again."""

    def serve(self, spin_us: int, idle_us: int, most_us: int, once: bool, /) -> Served:
        """Wait for a request, answer it, and so on, while each is the only one and plain. Releases the GIL.

        The same accept, compute and reply, with the real clock.

        Args:
            spin_us: How long to poll before sleeping.
            idle_us: Return after so long without a request.
            most_us: Return so long after the first request.
            once: Return after one request.

        Returns:
            What it answered; all others are left in their slots. Also returns soon after `leave` or an
            interrupt of the doorbell.
        """

    def leave(self) -> None:
        """Make `serve` return after the current request; if it is not running, its next call returns at once.

        Safe from any thread. To end its sleep, interrupt the doorbell afterwards.
        """

    def close(self) -> None:
        """Drop the buffers, so that the arena's memory can be freed. Idempotent.

        Raises ValueError: another method is running.
        """
