"""Hidden states of an engine on a GPU, on a fake one that counts what the host waits for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_client.engines import staging
from attention_client.engines.staging import Staged, Staging
from attention_client.engines.transformers.remote_experts import RemoteExperts
from control_plane import SHAPE
from fake_cuda import DeviceTensor, FakeCuda

HIDDEN, TOP_K = 512, 4
# Tensors of so many tokens pass through pinned memory, and of so many do not.
MANY, FEW = 128, 3


def inputs(
    cuda: FakeCuda, tokens: int, seed: int, device: str = "cuda:0"
) -> tuple[DeviceTensor, ...]:
    rng = torch.Generator().manual_seed(seed)
    x_TH = torch.randn(tokens, HIDDEN, generator=rng).bfloat16()
    ids_TK = torch.randint(32, (tokens, TOP_K), generator=rng)
    scores_TK = torch.rand(tokens, TOP_K, generator=rng)
    return tuple(cuda.tensor(each, device) for each in (x_TH, ids_TK, scores_TK))


def equal(hosts: tuple[torch.Tensor, ...], devices: tuple[DeviceTensor, ...]) -> bool:
    return all(
        host.is_cpu and torch.equal(host, device.memory)
        for host, device in zip(hosts, devices, strict=True)
    )


def test_a_call_waits_for_one_event_before_it_sends() -> None:
    made = Staging()
    with FakeCuda() as cuda:
        for seed in range(3):
            tensors = inputs(cuda, MANY, seed)
            staged = made.to_host(*tensors)
            assert equal(staged.tensors, tensors)
            assert cuda.waits == {"event": 1}
            assert cuda.copies == 3
            result_TH = staged.to_device(staged.tensors[0] * 2)
            # The result is on its way. That of the call before has left its memory.
            assert cuda.waits == {"event": 1 if seed == 0 else 2}
            assert cuda.copies == 4
            assert torch.equal(cuda.values(result_TH), tensors[0].memory * 2)
            cuda.waits.clear()
            cuda.copies = 0


def test_few_tokens_are_copied_plainly() -> None:
    """That took less time on a GPU. The host waits for its own stream, never for the device."""
    with FakeCuda() as cuda:
        tensors = inputs(cuda, FEW, 0)
        staged = Staging().to_host(*tensors)
        assert equal(staged.tensors, tensors)
        result_TH = staged.to_device(staged.tensors[0] + 1)
        assert torch.equal(cuda.values(result_TH), tensors[0].memory + 1)
    assert cuda.waits == {"stream": 4}


def test_a_result_has_left_before_a_call_in_another_stream_overwrites_it() -> None:
    made = Staging()
    with FakeCuda() as cuda:
        first, second = inputs(cuda, MANY, 0), inputs(cuda, MANY, 1)
        first_TH = made.to_host(*first).to_device(first[0].memory)
        with cuda.other_stream():
            second_TH = made.to_host(*second).to_device(second[0].memory)
        for result_TH, wanted in ((first_TH, first), (second_TH, second)):
            assert torch.equal(cuda.values(result_TH), wanted[0].memory)


def test_calls_from_a_device_that_is_not_the_current_one() -> None:
    """Their events are in that device's stream, and none is recorded on two devices."""
    made = Staging()
    results = []
    with FakeCuda() as cuda:
        for seed in range(6):
            tensors = inputs(cuda, MANY, seed, f"cuda:{seed % 2}")
            staged = made.to_host(*tensors)
            assert equal(staged.tensors, tensors)
            result_TH = staged.to_device(staged.tensors[0] * 2)
            assert result_TH.device == tensors[0].device
            results.append((result_TH, tensors[0].memory * 2))
        for result_TH, wanted_TH in results:
            assert torch.equal(cuda.values(result_TH), wanted_TH)


@settings(max_examples=30)
@given(st.data())
def test_calls_that_overlap_keep_their_memory_apart(data: st.DataObject) -> None:
    made = Staging()
    flying: list[tuple[Staged, tuple[DeviceTensor, ...]]] = []
    results: list[tuple[torch.Tensor, torch.Tensor]] = []
    with FakeCuda() as cuda:
        for seed in range(data.draw(st.integers(1, 6))):
            tensors = inputs(cuda, data.draw(st.sampled_from([FEW, MANY, 2 * MANY])), seed)
            flying.append((made.to_host(*tensors), tensors))
            while flying and data.draw(st.booleans()):
                staged, own = flying.pop(data.draw(st.integers(0, len(flying) - 1)))
                assert equal(staged.tensors, own)
                if data.draw(st.booleans()):
                    staged.drop()
                    continue
                out_TH = staged.tensors[0] * 2
                results.append((staged.to_device(out_TH), out_TH.clone()))
                # The caller may reuse its tensor at once.
                out_TH.zero_()
        for result_TH, wanted_TH in results:
            assert torch.equal(cuda.values(result_TH), wanted_TH)
    assert not cuda.waits["device"]


# -- transformers --------------------------------------------------------------------------------------


class Cluster:
    """Answers three times the hidden states, or fails."""

    def __init__(self) -> None:
        self.arguments: Any = None
        self.fails = False

    def layer_call(self, *arguments: Any) -> torch.Tensor:
        assert all(each is None or isinstance(each, int) or each.is_cpu for each in arguments)
        if self.fails:
            raise RuntimeError("no server")
        self.arguments = [each.clone() if hasattr(each, "clone") else each for each in arguments]
        x_TH: torch.Tensor = arguments[1]
        return 3 * x_TH


def experts(cluster: Any) -> RemoteExperts:
    return RemoteExperts(cluster, SHAPE)


def test_a_layer_of_transformers_waits_for_one_event() -> None:
    cluster = Cluster()
    with FakeCuda() as cuda:
        x_TH, ids_TK, scores_TK = inputs(cuda, MANY, 0)
        narrow_TK = cuda.tensor(scores_TK.memory.bfloat16())
        out_TH = experts(cluster).from_device(5, x_TH, ids_TK, narrow_TK)
        assert cuda.waits == {"event": 1}
        assert (out_TH.dtype, out_TH.device) == (x_TH.dtype, x_TH.device)
        assert torch.equal(cuda.values(out_TH), 3 * x_TH.memory)
    layer, sent_TH, sent_ids, sent_scores, wanted_T = cluster.arguments
    assert (layer, wanted_T) == (5, None)
    assert torch.equal(sent_TH, x_TH.memory)
    assert torch.equal(sent_ids, ids_TK.memory)
    assert torch.equal(sent_scores, scores_TK.memory.bfloat16().float())


def test_a_failed_call_gives_its_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    pinned = staging._Pinned

    def make(device: torch.device) -> Any:
        made.append(None)
        return pinned(device)

    monkeypatch.setattr(staging, "_Pinned", make)
    cluster = Cluster()
    made_once = experts(cluster)
    with FakeCuda() as cuda:
        tensors = inputs(cuda, MANY, 0)
        for cluster.fails in (True, False, True):
            if cluster.fails:
                with pytest.raises(RuntimeError, match="no server"):
                    made_once.from_device(0, *tensors)
            else:
                out_TH = cuda.values(made_once.from_device(0, *tensors))
                assert torch.equal(out_TH, 3 * tensors[0].memory)
    assert len(made) == 1


def test_on_the_cpu_nothing_is_copied() -> None:
    x_TH, ids_TK, scores_TK = (
        torch.ones(2, 8),
        torch.zeros(2, 1, dtype=torch.int64),
        torch.ones(2, 1),
    )
    cluster = Cluster()
    cluster.layer_call = lambda *arguments: arguments[1]  # type: ignore[method-assign,assignment]
    out_TH = experts(cluster).routed_experts(0, x_TH, ids_TK, scores_TK)
    assert out_TH.data_ptr() == x_TH.data_ptr()


# -- the fake ------------------------------------------------------------------------------------------
