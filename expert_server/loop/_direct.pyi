from _typeshed import WriteableBuffer

from eaas.wire.slot import SlotLimits

class Direct:
    """Answers one request in its slot, in compiled code (`_direct.c`). One caller at a time.

    Attributes:
        answered: Requests answered so far; a client that has its answer finds it counted.
    """

    answered: int

    def __new__(
        cls,
        buffer: WriteableBuffer,
        count: int,
        offsets: tuple[int, int, int],
        strides: tuple[int, int],
        limits: SlotLimits,
        layers: list[object | None],
    ) -> Direct:
        """Map an arena's slots, without changing them.

        Args:
            buffer: The arena's bytes.
            count: Number of slots.
            offsets: Offsets of flag 0, bell 0 and slot 0.
            strides: Bytes of a slot's request and of its result.
            limits: The server's limits.
            layers: The kernel's `ExpertKernel.direct`; the kernel may replace its items at any time.

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

    def release(self) -> None:
        """Drop the buffer, so that the arena's memory can be freed. Idempotent."""
