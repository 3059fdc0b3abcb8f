"""Rows 20, 21 and 26 of the fault contract: non-finite numbers, wrong shapes, damaged files."""

from __future__ import annotations

import json
import re
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from chaos_world import ChaosWorld, same
from eaas.checkpoint import Checkpoint
from eaas.errors import WrongRequestError
from eaas.net.grpc_client import channel
from eaas.rpc.v1 import expert_pb2 as pb
from eaas.rpc.v1 import expert_pb2_grpc
from eaas.versions import SLOTS
from eaas.wire import RequestHeader
from eaas_cli.local import LocalCluster
from eaas_cli.local.fork_server import ForkServer
from refusals import refusal

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(240)]

PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def cluster(checkpoint: Callable[..., Path], fork_server: ForkServer) -> Iterator[LocalCluster]:
    """One cluster for all tests: no request here changes it."""
    with LocalCluster(
        checkpoint(), servers=2, redundancy=2, clients=0, fork_server=fork_server
    ) as cluster:
        yield cluster


@pytest.mark.parametrize("transport", ["shm", "grpc"])
def test_row_20_nan_or_inf_in_one_token(
    cluster: LocalCluster, transport: str, chaos: ChaosWorld
) -> None:
    """Row 20: NaN or Inf in one token: stays in that row; batch neighbours unchanged; counted."""
    # One server gets all requests, so that the order of summation does not change.
    client = chaos.join(cluster, 2, transport=transport, dispatch="weights")
    x_TH, ids_TK, scores_TK = client.draw(16, seed=4)

    def call(x_TH: torch.Tensor) -> torch.Tensor:
        out_TH: torch.Tensor = client.cluster.layer_call(0, x_TH, ids_TK, scores_TK, None)
        return out_TH

    whole_TH = call(x_TH)
    assert client.count("eaas_nonfinite_rows_total") == 0
    for count, bad in enumerate((torch.nan, torch.inf, -torch.inf), start=1):
        sick_TH = x_TH.clone()
        sick_TH[5, 3] = bad
        out_TH = call(sick_TH)
        assert not out_TH[5].isfinite().all()
        others = [row for row in range(16) if row != 5]
        assert torch.equal(out_TH[others], whole_TH[others])
        assert client.count("eaas_nonfinite_rows_total") == count
    assert torch.equal(call(x_TH), whole_TH)
    assert client.failovers("refused") == 0


class ForgedHeaders:
    """The slots of a connection, which change the header of each request after it was written."""

    def __init__(self, connection: Any, changes: dict[str, int], sent: list[int]) -> None:
        self._slots, self._arena = connection.slots, connection._link.arena
        self._changes, self._sent = changes, sent

    def __getattr__(self, name: str) -> Any:
        return getattr(self._slots, name)

    def write(self, slot: int, request_id: int, *others: Any) -> bool:
        self._sent.append(request_id)
        written = bool(self._slots.write(slot, request_id, *others))
        buffer, offset = self._arena.buffer, self._arena.request_offset(slot)
        header = RequestHeader.unpack_from(buffer, offset)
        header._replace(**self._changes).pack_into(buffer, offset)
        return written


@pytest.mark.parametrize("transport", ["shm", "grpc"])
def test_row_21_wrong_hidden_size_or_dtype(
    cluster: LocalCluster, transport: str, monkeypatch: pytest.MonkeyPatch, chaos: ChaosWorld
) -> None:
    """Row 21: wrong hidden size or dtype: INVALID_ARGUMENT; not retried; not held against the server."""
    client = chaos.join(cluster, 2, transport=transport)
    expected_TH = client.layer()
    # Refused by the client, before anything is sent.
    narrow_TH = torch.zeros(4, client.shape.hidden_size // 2)
    few_TK, one_TK = torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, 1)
    with pytest.raises(WrongRequestError, match="hidden size"):
        client.cluster.layer_call(0, narrow_TH, few_TK, one_TK, None)
    doubled_TH = torch.zeros(4, client.shape.hidden_size, dtype=torch.float64)
    with pytest.raises(WrongRequestError, match="float64"):
        client.cluster.layer_call(0, doubled_TH, few_TK, one_TK, None)
    # Refused by the server: a client without that check.
    sent: list[int] = []
    for lie in ({"hidden_size": client.shape.hidden_size + 1}, {"dtype": 77}):
        sent.clear()
        with monkeypatch.context() as patch:
            for connection in client.cluster.view().connections:
                patch.setattr(connection, "slots", ForgedHeaders(connection, lie, sent))
            with pytest.raises(WrongRequestError, match=r"refused a request of layer 0"):
                client.layer(tokens=1)
        # A token's experts may be on two servers: each is asked once.
        assert 1 <= len(sent) <= 2
    for reason in ("slow", "failures"):
        assert client.count("eaas_ejections_total", reason=reason) == 0
    assert client.failovers("refused", "timeout", "corrupt", "lost") == 0
    assert client.cluster.view().usable_S().all()
    assert same(client.layer(), expected_TH)


def test_row_21_a_client_of_another_hidden_size_is_not_connected(cluster: LocalCluster) -> None:
    """Row 21: wrong hidden size: INVALID_ARGUMENT."""
    shape = Checkpoint.open(cluster.model).shape
    request = pb.ConnectRequest(
        client_id="a",
        protocol_version=SLOTS.newest,
        transport="grpc",
        slots=2,
        hidden_size=shape.hidden_size + 1,
        model_digest=shape.digest,
    )
    with channel(str(cluster.children["expert-server-0"].address)) as opened:
        stub = expert_pb2_grpc.ExpertServiceStub(opened)
        with pytest.raises(grpc.RpcError, match="hidden size") as caught:
            stub.Connect(request)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


# -- row 26 -------------------------------------------------------------------------------------------


def _shard(model: Path) -> Path:
    return sorted(model.glob("*.safetensors"))[0]


def _truncated(model: Path) -> None:
    with _shard(model).open("r+b") as file:
        file.truncate(_shard(model).stat().st_size - 100)


def _bloated(model: Path) -> None:
    with _shard(model).open("r+b") as file:
        file.write(struct.pack("<Q", 1 << 40))


def _corrupted(model: Path) -> None:
    """The header gives a tensor the wrong length."""
    shard = _shard(model)
    data = shard.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    name = next(name for name in header if ".experts." in name)
    header[name]["data_offsets"][1] -= 4
    text = json.dumps(header, separators=(",", ":")).encode().ljust(length)
    assert len(text) == length
    shard.write_bytes(data[:8] + text + data[8 + length :])


def _pickled(model: Path) -> None:
    for shard in model.glob("*.safetensors"):
        shard.rename(shard.with_suffix(".bin"))
    (model / "model.safetensors.index.json").unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (_truncated, r"\.safetensors.*tensor model\."),
        (_bloated, r"\.safetensors.*header"),
        (_corrupted, r"\.safetensors.*tensor model\..*experts"),
        (_pickled, r"pickle|\.bin|safetensors"),
    ],
)
def test_row_26_a_checkpoint_that_is_damaged_is_refused_before_serving(
    cluster: LocalCluster,
    tmp_path: Path,
    damage: Callable[[Path], None],
    named: str,
    chaos: ChaosWorld,
) -> None:
    """Row 26: shard corrupted, truncated or with a bloated header; a pickle file: refused before SERVING,
    the file and tensor named; other experts serve.
    """
    client = chaos.join(cluster, 2)
    expected_TH = client.layer()
    model = Path(shutil.copytree(cluster.model, tmp_path / "damaged"))
    damage(model)
    child = chaos.by_hand(cluster, "damaged", model)
    why = refusal(child)
    assert re.search(named, why)
    assert str(model) in why
    assert "damaged" not in client.cluster.session.view.members
    assert torch.equal(client.layer(), expected_TH)
