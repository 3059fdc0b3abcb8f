"""Tokens per expert, which the kernels count, as the handler reports them."""

from __future__ import annotations

from types import SimpleNamespace

from eaas.rpc.v1 import expert_pb2 as pb
from eaas.types import ModelShape
from expert_server.load_report.hotness import HotnessHandler, carried

E = 8
INTERFACES = """Inter-| Receive            | Transmit
 face |bytes packets and six more|bytes packets and so on
    lo: 9999 41 0 0 0 0 0 0 9999 41 0 0 0 0 0 0
  eth0:1000 7 0 0 0 0 0 0 300 5 0 0 0 0 0 0
  ib0: 50 1 0 0 0 0 0 0 7 1 0 0 0 0 0 0
"""
SHAPE = ModelShape("tiny", E, 32, 3, ("l0", "l1"), "float32", "digest")


def test_unchanged_totals_are_not_sent_again() -> None:
    loop = SimpleNamespace(requests=0, busy_s=0.0, batches=0)
    handler = HotnessHandler(SHAPE, loop, SimpleNamespace(expert_bytes=1000))

    def read(boot_id: int = 0, sequence: int = 0) -> pb.ReadHotnessResponse:
        return handler.ReadHotness(pb.ReadHotnessRequest(boot_id=boot_id, sequence=sequence), None)

    first = read()
    assert first.boot_id
    assert first.expert_bytes == 1000
    assert [list(layer.tokens) for layer in first.layers] == [[0] * E] * 2
    handler.counts_LX[1, 1 + 3] += 5
    handler.counts_LX[1, 0] += 1
    loop.requests, loop.busy_s, loop.batches = 1, 0.25, 1
    second = read(first.boot_id, first.sequence)
    assert second.layers[1].tokens[3] == 5
    assert (second.busy_s, second.batches, second.visits) == (0.25, 1, 1)
    assert second.boot_id == first.boot_id
    # Totals: an answer that was lost is in the next one, and one that came twice says the same.
    assert read(first.boot_id, first.sequence).layers == second.layers
    assert not read(second.boot_id, second.sequence).layers
    other = HotnessHandler(SHAPE, loop, SimpleNamespace(expert_bytes=0))
    answer = other.ReadHotness(pb.ReadHotnessRequest(boot_id=first.boot_id, sequence=1), None)
    assert answer.layers, "another process with the same sequence"
    assert answer.expert_bytes == 0


def test_carried_bytes_are_those_of_all_interfaces_but_the_loopback() -> None:
    assert carried(INTERFACES) == (1050, 307)
    assert carried("\n".join(INTERFACES.splitlines()[:3])) == (0, 0)
