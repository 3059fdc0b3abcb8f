"""Row 23 of the fault contract, the server's side: a batch that cannot be in its slot."""

from __future__ import annotations

import pytest

from eaas.wire import RequestHeader
from eaas.wire.slot import Status, WireDtype


@pytest.mark.parametrize("more", [1, 2, 1000, 2**31])
@pytest.mark.parametrize("consistent", [True, False])
def test_row_23_a_forged_batch_is_refused(bench, more: int, consistent: bool) -> None:
    """Row 23: a batch larger than a slot: a forged one is refused. (Its header claims more than the slot
    holds: only the number of tokens, or also a matching payload length.)
    """
    liar, other = bench.grant("liar"), bench.grant("other")
    slot = bench.write(liar, 3)
    tokens = bench.tokens + more
    if consistent:
        forged = RequestHeader.of(
            dtype=WireDtype.FLOAT32, generation=liar.generation, request_id=5, epoch=1,
            budget_us=1_000_000, layer=0, batch_size=tokens, hidden_size=bench.hidden,
            top_k=bench.top_k, flags=0,
        )  # fmt: skip
        forged.pack_into(bench.arena.buffer, bench.arena.request_offset(slot))
    else:
        bench.rewrite(slot, batch_size=tokens)
    before = bytes(bench.arena.buffer)
    bench.step()
    assert bench.result(slot).status in (Status.INVALID_ARGUMENT, Status.INTERNAL)
    assert (bench.result(slot).rows, bench.result(slot).length) == (0, 0)
    assert (bench.loop.refused, bench.loop._views.made, bench.kernel.batches) == (1, 0, [])
    start, end = bench.arena.request_offset(slot), bench.arena.result_offset(slot)
    assert bench.arena.buffer[start:end] == before[start:end]
    # The others go on.
    honest = bench.write(other, 7)
    bench.step()
    assert (bench.take(other, honest)[1] == 28).all()
