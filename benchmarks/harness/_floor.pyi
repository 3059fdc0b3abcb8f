from _typeshed import ReadableBuffer, WriteableBuffer

def round_trips(
    shared: WriteableBuffer,
    source: ReadableBuffer,
    answer: ReadableBuffer,
    destination: WriteableBuffer,
    took_ns: WriteableBuffer,
    core: int,
    for_ns: int,
    /,
) -> int:
    """Time round trips to a thread that copies only; both sides spin, without the GIL. Returns their number.

    Args:
        shared: Memory between the two sides; aligned to 64 bytes, with 64 bytes before the request.
        source: The request.
        answer: The result, which the other side copies in.
        destination: Gets the result.
        took_ns: u64 for each round trip at most, which gets the nanoseconds that it took.
        core: Core of the other side.
        for_ns: Time after which no round trip begins, once there were 20.

    Raises:
        ValueError: The memory does not hold the request and the result.
        OSError: No thread can run on the core.
    """

def empty_layer(hidden: int, /) -> object:
    """Make a layer for a server's compiled code (`ExpertKernel.direct`) that computes nothing."""
