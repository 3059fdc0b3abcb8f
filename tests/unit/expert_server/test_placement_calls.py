"""Calls of the balancer, and their refusals."""

import threading
from collections.abc import Callable, Collection, Mapping
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from eaas.control_plane.expert_calls import MISMATCH_KEY
from eaas.errors import CorruptShardError, DeviceFullError, DeviceLostError, ExpertMismatchError
from eaas.rpc.v1 import common_pb2
from eaas.rpc.v1 import expert_pb2 as pb
from eaas.types import ModelShape
from expert_server.experts.placements import PlacementHandler
from expert_server.load_report.hotness import HotnessHandler, carried
from waiting import eventually

SHAPE = ModelShape("tiny", 4, 64, 2, ("l0", "l1"), "float32", "digest")


def right(layer: int, expert: int) -> int:
    """Digest of the right bytes."""
    return 100 * layer + expert + 1


class Store:
    """A store whose loading speed the test controls."""

    def __init__(self) -> None:
        self.experts: dict[int, set[int]] = {0: set(), 1: set()}
        self.spares: frozenset[tuple[int, int]] = frozenset()
        self.on_load: Callable[[], None] = lambda: None
        self.broken = False
        # Digests of the bytes here, by layer and expert.
        self.damaged: dict[tuple[int, int], int] = {}

    def digest(self, layer: int, expert: int) -> int:
        held = expert in self.experts[layer]
        return self.damaged.get((layer, expert), right(layer, expert)) if held else 0

    @property
    def count(self) -> int:
        return sum(map(len, self.experts.values())) - len(self.spares)

    def held(self) -> dict[int, list[int]]:
        return {
            layer: sorted(e for e in experts if (layer, e) not in self.spares)
            for layer, experts in self.experts.items()
        }

    def load(
        self,
        wanted: Mapping[int, Collection[int]],
        is_given_up: Callable[[], bool],
        digests: Mapping[tuple[int, int], int],
    ) -> int:
        for place in self.damaged.keys() & digests.keys():
            if digests[place] != self.damaged[place]:
                raise ExpertMismatchError(f"model.safetensors: expert {place} differs")
        if self.broken:
            raise CorruptShardError("model.safetensors: tensor x is short")
        for layer, experts in wanted.items():
            for expert in experts:
                self.experts[layer].add(expert)
                self.spares -= {(layer, expert)}
                self.on_load()
                if is_given_up():
                    return 0
        return 0

    def load_spares(
        self,
        wanted: Collection[tuple[int, int]],
        is_given_up: Callable[[], bool],
        digests: Mapping[tuple[int, int], int],
    ) -> None:
        for layer, expert in sorted(wanted):
            if expert not in self.experts[layer] and not is_given_up():
                self.load({layer: [expert]}, is_given_up, digests)
                self.spares |= {(layer, expert)}

    def unload_spares(self, kept: Collection[tuple[int, int]] = ()) -> None:
        for layer, expert in self.spares.difference(kept):
            self.unload({layer: [expert]})
        self.spares = self.spares.intersection(kept)

    def unload(self, unwanted: Mapping[int, Collection[int]]) -> None:
        for layer, experts in unwanted.items():
            self.experts[layer] -= set(experts)


class Refused(Exception):
    pass


class Context:
    def __init__(self) -> None:
        self.trailing: Any = ()
        self.active = True

    def is_active(self) -> bool:
        return self.active

    def set_trailing_metadata(self, trailing: Any) -> None:
        self.trailing = trailing

    def abort(self, code: grpc.StatusCode, details: str) -> None:
        raise Refused(f"{code.name}: {details}")


class Server:
    def __init__(self, is_limited: bool = False) -> None:
        self.store = Store()
        self.told: list[tuple[str, int]] = []
        self.handler: Any = PlacementHandler(
            self.store,  # type: ignore[arg-type]
            SHAPE,
            lambda epoch: self.told.append(("prepared", epoch)),
            lambda epoch: self.told.append(("retired", epoch)),
            is_limited,
            lambda error: self.told.append(("unloadable", 0)),
        )

    def prepare(self, epoch: int, *layers: list[int]) -> Any:
        request = pb.PreparePlacementRequest(epoch=epoch, layers=_layers(layers))
        return self.handler.PreparePlacement(request, Context())

    def retire(self, epoch: int, *layers: list[int]) -> Any:
        request = pb.RetirePlacementRequest(epoch=epoch, layers=_layers(layers))
        return self.handler.RetirePlacement(request, Context())

    def spare(
        self, epoch: int, *layers: list[int], load_s: float = 60.0, active: bool = True
    ) -> tuple[list[list[int]], int]:
        request = pb.HoldSparesRequest(epoch=epoch, layers=_layers(layers), load_s=load_s)
        context = Context()
        context.active = active
        response = self.handler.HoldSpares(request, context)
        return [list(layer.experts) for layer in response.layers], response.loaded

    def list(self) -> tuple[int, list[list[int]]]:
        response = self.handler.ListExperts(pb.ListExpertsRequest(), Context())
        return response.epoch, [list(layer.experts) for layer in response.layers]


def _layers(layers: tuple[list[int], ...]) -> list[common_pb2.Holding]:
    return [common_pb2.Holding(experts=experts) for experts in layers]


def test_prepare_loads_and_retire_unloads() -> None:
    server = Server()
    assert server.list() == (0, [[], []])
    assert server.prepare(1, [0, 1], [2]).experts == 3
    assert server.prepare(2, [1, 3], []).experts == 4
    assert server.list() == (2, [[0, 1, 3], [2]])
    assert server.retire(2, [1, 3], []).experts == 2
    assert server.list() == (2, [[1, 3], []])
    assert server.told == [("prepared", 1), ("prepared", 2), ("retired", 2)]


def test_an_older_epoch_is_refused_and_changes_nothing() -> None:
    server = Server()
    server.prepare(5, [0], [0])
    for call in (server.prepare, server.retire):
        with pytest.raises(Refused, match="FAILED_PRECONDITION: epoch 4 is older than 5"):
            call(4, [1], [])
    assert server.list() == (5, [[0], [0]])
    # A server that holds nothing learns of an epoch by its retirement.
    server.retire(7, [], [])
    assert server.list() == (7, [[], []])
    with pytest.raises(Refused, match="epoch 6 is older than 7"):
        server.prepare(6, [1], [])


def test_a_newer_epoch_ends_an_older_load() -> None:
    server = Server()
    entered, overtaken = threading.Event(), threading.Event()
    refused: list[Exception] = []

    def block() -> None:
        entered.set()
        overtaken.wait(10)

    def slow() -> None:
        try:
            server.prepare(1, [0, 1, 2, 3], [])
        except Refused as error:
            refused.append(error)

    server.store.on_load = block
    first = threading.Thread(target=slow)
    first.start()
    assert entered.wait(10)
    second = threading.Thread(target=server.prepare, args=(2, [], [3]))
    second.start()
    while server.handler._newest_epoch < 2:
        pass
    # A balancer that asks now continues above that epoch.
    assert server.list()[0] == 2
    overtaken.set()
    first.join()
    second.join()
    assert "ABORTED: epoch 2 is newer than 1" in str(refused[0])
    assert server.list() == (2, [[0], [3]])
    assert server.told == [("prepared", 2)]


def test_remains_of_abandoned_placements_are_dropped() -> None:
    """A server without a share gets no requests, and the balancer does not count the experts it loaded."""
    server = Server(is_limited=True)
    server.store.on_load = lambda: setattr(server.handler, "_newest_epoch", 2)
    with pytest.raises(Refused, match="ABORTED: epoch 2 is newer than 1"):
        server.prepare(1, [0, 1], [2])
    server.store.on_load = lambda: None
    assert server.list() == (2, [[0], []])
    server.prepare(2, [3], [1])
    assert server.list() == (2, [[3], [1]])
    server.prepare(3, [2], [1])
    assert server.list() == (3, [[2, 3], [1]]), "from then on nothing goes before it is told to"


def test_an_unreadable_expert_is_an_error_and_can_be_retried() -> None:
    server = Server()
    server.store.broken = True
    with pytest.raises(Refused, match=r"DATA_LOSS: model.safetensors: tensor x is short"):
        server.prepare(1, [0], [])
    assert server.told == [("unloadable", 0)]
    server.store.broken = False
    assert server.prepare(1, [0], []).experts == 1


@pytest.mark.parametrize(
    ("layers", "what"),
    [(([0],), "1 layers, the model has 2"), (([0], [4]), "expert ids must not exceed 3")],
)
def test_a_share_of_another_model_is_refused(layers: tuple[list[int], ...], what: str) -> None:
    for call in (Server().prepare, Server().retire):
        with pytest.raises(Refused, match=f"INVALID_ARGUMENT: {what}"):
            call(1, *layers)


def test_named_layers_are_loaded_first() -> None:
    server = Server()
    seen: list[list[int]] = []
    plain = server.store.load

    def load(wanted: Any, is_given_up: Any, digests: Any) -> int:
        seen.append(list(wanted))
        return plain(wanted, is_given_up, digests)

    server.store.load = load  # type: ignore[method-assign]
    for order, expected in (((), [0, 1]), ((1,), [1, 0]), ((7, 1, 0), [1, 0])):
        layers = [common_pb2.Holding(experts=[0])] * 2
        request = pb.PreparePlacementRequest(epoch=1, layers=layers, layer_order=order)
        server.handler.PreparePlacement(request, Context())  # type: ignore[arg-type]
        assert seen[-1] == expected


# -- digests -------------------------------------------------------------------------------------------


def with_digests(*known: dict[int, int]) -> list[common_pb2.Holding]:
    """Experts with their digests, by layer; 0: not known."""
    return [common_pb2.Holding(experts=sorted(k), digests=[k[e] for e in sorted(k)]) for k in known]


def spares_request(layers: list[common_pb2.Holding]) -> pb.HoldSparesRequest:
    return pb.HoldSparesRequest(epoch=1, layers=layers, load_s=60.0)


def told(server: Server, epoch: int, *known: dict[int, int], context: Any = None) -> Any:
    request = pb.PreparePlacementRequest(epoch=epoch, layers=with_digests(*known))
    return server.handler.PreparePlacement(request, context or Context())


def test_a_share_is_in_force_once_all_digests_match() -> None:
    server = Server()
    lacking = told(server, 1, {0: 0, 3: right(0, 3)}, {2: 0})
    assert lacking.awaits_digests
    assert list(lacking.layers) == with_digests({0: right(0, 0), 3: right(0, 3)}, {2: right(1, 2)})
    assert server.told == []
    assert server.handler.epoch == 0
    full = told(server, 1, {0: right(0, 0), 3: right(0, 3)}, {2: right(1, 2)})
    assert not full.awaits_digests
    assert server.told == [("prepared", 1)]
    listed = server.handler.ListExperts(pb.ListExpertsRequest(), Context())
    assert list(listed.layers) == list(lacking.layers)


def test_a_balancer_of_an_older_release_compares_nothing() -> None:
    server = Server()
    assert not server.prepare(1, [0], [2]).awaits_digests
    assert server.told == [("prepared", 1)]


def test_other_bytes_are_refused_before_they_are_in_force() -> None:
    server, context = Server(), Context()
    server.store.damaged[1, 2] = 7
    told(server, 1, {0: 0}, {2: 0})
    with pytest.raises(Refused, match=r"DATA_LOSS: model.safetensors: expert \(1, 2\) differs"):
        told(server, 1, {0: right(0, 0)}, {2: right(1, 2)}, context=context)
    assert dict(context.trailing) == {MISMATCH_KEY: "1"}
    assert server.told == [("unloadable", 0)]
    assert server.handler.epoch == 0


def test_a_missing_digest_is_refused() -> None:
    layers = [common_pb2.Holding(experts=[0, 1], digests=[5]), common_pb2.Holding()]
    request = pb.PreparePlacementRequest(epoch=1, layers=layers)
    with pytest.raises(
        Refused, match="INVALID_ARGUMENT: the numbers of digests and experts differ"
    ):
        Server().handler.PreparePlacement(request, Context())


def test_spare_replicas_are_beside_the_share() -> None:
    server = Server()
    server.prepare(1, [0, 1], [2])
    assert server.spare(1, [3], [0, 2]) == ([[3], [0]], 2)
    assert server.list() == (1, [[0, 1], [2]])
    assert server.store.count == 3
    # The whole wish each time: one stays, one goes, one comes.
    assert server.spare(1, [2], [0]) == ([[2], [0]], 1)
    assert server.store.held() == {0: [0, 1], 1: [2]}
    assert server.spare(1, [], []) == ([[], []], 0)
    assert server.store.experts == {0: {0, 1}, 1: {2}}


def test_a_roll_out_takes_over_or_unloads_spare_replicas() -> None:
    server = Server()
    server.prepare(1, [0], [0])
    server.spare(1, [1, 2], [3])
    server.prepare(2, [0, 1], [0])
    # Clients of the older placement may still use the others.
    assert server.store.spares == {(0, 2), (1, 3)}
    server.retire(2, [0, 1], [0])
    assert server.store.experts == {0: {0, 1}, 1: {0}}
    assert not server.store.spares


def test_limited_memory_is_for_the_share_first() -> None:
    server = Server(is_limited=True)
    server.prepare(1, [0], [0])
    server.spare(1, [1, 2], [3])
    beside: list[frozenset[tuple[int, int]]] = []
    server.store.on_load = lambda: beside.append(server.store.spares)
    server.prepare(2, [0, 1], [1])
    # The share takes one over; the others are unloaded before it loads.
    assert beside[0] == {(0, 1)}
    assert server.store.experts == {0: {0, 1}, 1: {0, 1}}


def test_spare_replicas_of_another_epoch_are_refused() -> None:
    server = Server()
    for epoch in (0, 1):
        with pytest.raises(Refused, match=f"FAILED_PRECONDITION: epoch {epoch} is not in force"):
            server.spare(epoch, [1], [])
    server.prepare(2, [0], [])
    for epoch in (1, 3):
        with pytest.raises(Refused, match="2 is"):
            server.spare(epoch, [1], [])
    with pytest.raises(Refused, match="INVALID_ARGUMENT"):
        server.spare(2, [4], [])
    assert server.store.experts == {0: {0}, 1: set()}


@pytest.mark.parametrize("end", ["time", "caller", "placement"])
def test_loads_of_spare_replicas_end_early(end: str) -> None:
    server = Server()
    server.prepare(1, [0], [0])

    def newer() -> None:
        server.handler._newest_epoch = 2

    if end == "placement":
        server.store.on_load = newer
    load_s, active = 0.0 if end == "time" else 60.0, end != "caller"
    held, loaded = server.spare(1, [1], [1], load_s=load_s, active=active)
    expected = [[1], []] if end == "placement" else [[], []]
    assert (held, loaded) == (expected, len(expected[0]))


def test_a_damaged_spare_replica_is_refused_by_name_and_one_without_a_digest_left_out() -> None:
    server = Server()
    server.prepare(1, [0], [])
    layers = with_digests({1: right(0, 1), 2: 0}, {})
    response = server.handler.HoldSpares(spares_request(layers), Context())
    assert [list(layer.experts) for layer in response.layers] == [[1], []]
    server.spare(1, [], [])
    server.store.damaged[0, 1] = 7
    layers = with_digests({1: 8}, {})
    with pytest.raises(Refused, match=r"DATA_LOSS: model.safetensors: expert \(0, 1\) differs"):
        server.handler.HoldSpares(spares_request(layers), Context())
    # The share is not at fault.
    assert ("unloadable", 0) not in server.told


def test_a_retirement_ends_the_load_of_spare_replicas() -> None:
    server = Server()
    server.prepare(1, [0], [0])
    retired = threading.Thread(target=server.retire, args=(2, [0], [0]))

    def retire() -> None:
        retired.start()
        eventually(lambda: server.handler._newest_epoch == 2, 10)

    server.store.on_load = retire
    held, loaded = server.spare(1, [1], [1, 2])
    assert (held, loaded) == ([[1], []], 1)
    retired.join(10)
    assert server.store.experts == {0: {0}, 1: {0}}


def test_a_lost_device_ends_the_server_and_a_full_one_is_not_a_damaged_checkpoint() -> None:
    store, lost = Store(), []
    handler = PlacementHandler(
        store,  # type: ignore[arg-type]
        SHAPE,
        lambda _epoch: None,
        lambda _epoch: None,
        on_lost=lost.append,
    )
    share = pb.PreparePlacementRequest(epoch=1, layers=_layers(([0], [0])))
    spares = spares_request(_layers(([1], [])))
    handler.PreparePlacement(share, Context())  # type: ignore[arg-type]

    def fail_with(error: Exception) -> None:
        def fail() -> None:
            raise error

        store.on_load = fail

    fail_with(DeviceFullError("layer 0, expert 1: no memory left"))
    with pytest.raises(Refused, match=r"RESOURCE_EXHAUSTED: layer 0, expert 1: no memory"):
        handler.HoldSpares(spares, Context())  # type: ignore[arg-type]
    assert not lost
    store.experts[0].discard(1)
    fail_with(DeviceLostError("the device failed"))
    with pytest.raises(Refused, match="UNAVAILABLE: the device failed"):
        handler.HoldSpares(spares, Context())  # type: ignore[arg-type]
    share.epoch = 2
    with pytest.raises(Refused, match="UNAVAILABLE: the device failed"):
        handler.PreparePlacement(share, Context())  # type: ignore[arg-type]
    assert len(lost) == 2


E = 8
INTERFACES = """Inter-| Receive            | Transmit
 face |bytes packets and six more|bytes packets and so on
    lo: 9999 41 0 0 0 0 0 0 9999 41 0 0 0 0 0 0
  eth0:1000 7 0 0 0 0 0 0 300 5 0 0 0 0 0 0
  ib0: 50 1 0 0 0 0 0 0 7 1 0 0 0 0 0 0
"""
COUNTED = ModelShape("tiny", E, 32, 3, ("l0", "l1"), "float32", "digest")


def test_unchanged_totals_are_not_sent_again() -> None:
    loop = SimpleNamespace(requests=0, busy_s=0.0, batches=0)
    handler = HotnessHandler(COUNTED, loop, SimpleNamespace(expert_bytes=1000))

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
    other = HotnessHandler(COUNTED, loop, SimpleNamespace(expert_bytes=0))
    answer = other.ReadHotness(pb.ReadHotnessRequest(boot_id=first.boot_id, sequence=1), None)
    assert answer.layers, "another process with the same sequence"
    assert answer.expert_bytes == 0


def test_carried_bytes_are_those_of_all_interfaces_but_the_loopback() -> None:
    assert carried(INTERFACES) == (1050, 307)
    assert carried("\n".join(INTERFACES.splitlines()[:3])) == (0, 0)
