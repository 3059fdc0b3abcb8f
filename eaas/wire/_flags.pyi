from _typeshed import WriteableBuffer

class Flags:
    """Flags and bells in a shared buffer, for any number of threads and processes at once.

    A flag is a u32 (values 0..31) on its own 64-byte line. A bell is a 64-byte line that waiters
    sleep on. Whoever sets a flag rings the bell of those who wait for it. All methods raise
    IndexError for a flag or a bell that is not there, and ValueError for another argument out of
    range or after `release`.
    """

    def __new__(
        cls,
        buffer: WriteableBuffer,
        flags_offset: int,
        count: int,
        bells_offset: int,
        bells: int,
    ) -> Flags:
        """Lays `count` flags and `bells` bells over a buffer; changes nothing in it.

        Raises:
            ValueError: They do not lie inside the buffer, are not aligned to 64 bytes, or are
                fewer than 1.
            BufferError: The buffer is read-only.
        """

    def load(self, i: int, /) -> int:
        """The flag's value (acquire); a peer that misbehaves can have put any u32 there."""

    def exchange(self, i: int, value: int, /) -> int:
        """Sets a flag whatever it was; returns the old value (sequentially consistent)."""

    def compare_exchange(self, i: int, expect: int, value: int, /) -> bool:
        """Sets a flag if it has the value `expect`; says whether it did (release, and acquire)."""

    def ring(self, bell: int, /) -> None:
        """Wakes all who sleep on a bell, after a flag was set. Costs a fence when nobody sleeps."""

    def interrupt(self, bell: int, /) -> None:
        """Says that something outside the flags changed: moves `seq` in any case, and wakes all."""

    def seq(self, bell: int, /) -> int:
        """A number that every interrupt moves and any ring may move (acquire; u32, wraps)."""

    def scan(self, first: int, count: int, mask: int, /) -> list[int]:
        """Of `count` indices from `first`, those whose value v has bit `1 << v` in mask."""

    def wait(
        self,
        first: int,
        count: int,
        mask: int,
        bell: int,
        seen_seq: int,
        spin_us: int,
        timeout_us: int,
    ) -> list[int]:
        """Waits until `scan(first, count, mask)` is not empty and returns it.

        Spins at first and then sleeps on the bell, both without the GIL; Python's signal handlers
        run at least every 250 ms.

        Args:
            first: First flag to look at.
            count: How many flags to look at.
            mask: The values to wait for, one bit each.
            bell: The bell that is rung for these flags.
            seen_seq: A `seq(bell)` from before the caller looked at whatever else it waits for: the
                wait returns [] once the seq is another one. Rings for other flags move it too: []
                means "look again", not "interrupted". Negative: do not look at it.
            spin_us: Microseconds to spin before sleeping; -1: spin until the timeout. While waits
                usually end within ten times as long, it spins that long: a sleep costs more.
            timeout_us: Microseconds (monotonic) after which [] is returned; 0 looks once.

        Returns:
            The ready indices, ascending; [] on timeout or when the seq moved.

        Raises:
            ValueError: Also when another thread releases the flags during the wait (within 250 ms).
        """

    def fence(self) -> None:
        """Acquire fence: what was loaded before it is not later than what is loaded after it."""

    def release(self) -> None:
        """Drops the buffer, for it to be closed; a thread in `wait` keeps it until it leaves."""
