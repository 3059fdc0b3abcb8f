from _typeshed import ReadableBuffer, WriteableBuffer

def call(
    mapping: WriteableBuffer,
    source: ReadableBuffer,
    destination: WriteableBuffer,
    took_ns: WriteableBuffer,
    timeout_ms: int,
    check: bool,
    /,
) -> None:
    """Round trips: copies `source` into the mapping, waits, copies the result to `destination`.

    Both sides spin, without the GIL; Python's signal handlers run at least every 50 ms.

    Args:
        mapping: Shared with the process in `serve`; aligned to 64 bytes.
        source: The request; its length, 64 bytes at least, is the request's.
        destination: Gets the result; its length, 64 bytes at least, is the result's. The first 64 bytes of
            both are headers, which the two sides fill.
        took_ns: u64 for each round trip, which gets the nanoseconds that it took.
        timeout_ms: Of one round trip.
        check: Whether the two sides compare digests of all that was copied. It takes time.

    Raises:
        TimeoutError: No answer in time.
        RuntimeError: The answer is not this round trip's, or other bytes arrived than were sent.
        ValueError: The mapping does not hold the request and the result.
    """

def serve(mapping: WriteableBuffer, source: ReadableBuffer, /) -> None:
    """Answers each request with as much of `source` as the client wants, until `stop`.

    Spins while it is asked and sleeps once nobody has asked for 3 ms.

    Raises:
        ValueError: A result longer than `source`, or a request that the mapping does not hold.
    """

def empty_layer(hidden: int, /) -> object:
    """Make a layer for a server's compiled code (`ExpertKernel.direct`) that computes nothing."""

def stop(mapping: WriteableBuffer, /) -> None:
    """Ends `serve`."""
