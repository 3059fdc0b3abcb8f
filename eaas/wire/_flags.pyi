from _typeshed import WriteableBuffer

LINE_BYTES: int
"""Bytes of a flag's or doorbell's line, a cache line of its own."""

class Flags:
    """Flags and doorbells in a shared buffer. Safe for concurrent threads and processes.

    A flag is a u32 (values 0..31) on its own 64-byte line. A doorbell (an eventcount) is a 64-byte line that
    waiters sleep on; ring the waiters' doorbell after setting a flag. All methods raise IndexError for an
    unknown flag or doorbell, and ValueError for other arguments out of range or after `release`.
    """

    def __new__(
        cls,
        buffer: WriteableBuffer,
        flags_offset: int,
        count: int,
        doorbells_offset: int,
        doorbells: int,
    ) -> Flags:
        """Map `count` flags and `doorbells` doorbells onto a buffer, without changing it.

        Raises:
            ValueError: They exceed the buffer, are not aligned to 64 bytes, or are fewer than 1.
            BufferError: The buffer is read-only.
        """

    def load(self, i: int, /) -> int:
        """Load a flag (acquire); a faulty peer may have written any u32."""

    def exchange(self, i: int, value: int, /) -> int:
        """Set a flag and return the old value (sequentially consistent)."""

    def compare_exchange(self, i: int, expect: int, value: int, /) -> bool:
        """Set a flag if its value is `expect`; return whether it was (acquire and release)."""

    def ring(self, doorbell: int, /) -> None:
        """Wake all sleepers of a doorbell, after setting a flag. Costs only a fence without sleepers."""

    def interrupt(self, doorbell: int, /) -> None:
        """Change `seq` and wake all sleepers, for events outside the flags."""

    def seq(self, doorbell: int, /) -> int:
        """Sequence number (u32, acquire); every interrupt changes it, a ring may change it."""

    def scan(self, first: int, count: int, mask: int, /) -> list[int]:
        """Indices, of `count` from `first`, of flags with value v and bit `1 << v` set in mask."""

    def wait(
        self,
        first: int,
        count: int,
        mask: int,
        doorbell: int,
        seen_seq: int,
        spin_us: int,
        timeout_us: int,
        /,
    ) -> list[int]:
        """Wait until `scan(first, count, mask)` is not empty and return it.

        Spins, then sleeps on the doorbell, both without the GIL. Python's signal handlers run at least every
        250 ms.

        Args:
            first: First flag.
            count: Number of flags.
            mask: The values to wait for, one bit each.
            doorbell: The doorbell rung for these flags.
            seen_seq: `seq(doorbell)` from before the caller checked its other conditions. The wait returns []
                when the sequence number differs. Rings for other flags change it, too, so check the
                conditions again after []. Negative: ignore the sequence number.
            spin_us: Microseconds to spin before sleeping; -1 spins until the timeout. The spin extends up to
                ten times as long while waits usually end in that time, because a sleep costs more.
            timeout_us: Microseconds (monotonic) until [] is returned; 0 checks once.

        Returns:
            The ready indices in ascending order; [] on timeout or if the sequence number changed.

        Raises:
            ValueError: Also when another thread releases the flags during the wait (within 250 ms).
        """

    def fence(self) -> None:
        """Acquire fence: loads before it are not reordered with loads after it."""

    def release(self) -> None:
        """Drop the buffer; a thread in `wait` keeps it until it returns."""
