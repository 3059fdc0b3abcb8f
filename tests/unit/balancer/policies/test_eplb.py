"""EPLB against a slow, plain one; what goes beyond DeepSeek's inputs."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from balancer.policies import plan, rebalance_experts

# The example that DeepSeek publishes with its program, and its answer.
WEIGHT = [
    [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
    [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
]
PHY2LOG = [
    [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
    [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
]
F32 = np.float32


def packed(loads: list[Any], packs: int) -> list[list[int]]:
    """Items of each pack: heaviest first, to the lightest pack that is not full."""
    each = len(loads) // packs
    if each == 1:
        return [[i] for i in range(packs)]
    found: list[list[int]] = [[] for _ in range(packs)]
    sums = [F32(0)] * packs
    for item in sorted(range(len(loads)), key=lambda i: (-loads[i], i)):
        open_packs = [p for p in range(packs) if len(found[p]) < each]
        lightest = min(open_packs, key=lambda p: (sums[p], p))
        found[lightest].append(item)
        sums[lightest] = F32(sums[lightest] + loads[item])
    return found


def oracle(
    load_E: list[Any], replicas: int, groups: int, nodes: int, servers: int
) -> tuple[list[int], list[list[tuple[int, int]]]]:
    """A plain version for a layer: (replicas of each expert, (expert, rank) pairs of each server)."""
    experts = len(load_E)
    if groups % nodes:
        groups = nodes = 1
    size = experts // groups
    group_loads = [F32(sum(map(float, load_E[g * size : (g + 1) * size]))) for g in range(groups)]
    counts, on_servers = [1] * experts, []
    for node in packed(group_loads, nodes):
        members = [g * size + i for g in node for i in range(size)]
        owners = list(members)
        for _ in range((replicas - experts) // nodes):
            # The first of those with the highest load per replica.
            hottest = max(members, key=lambda e: F32(load_E[e]) / F32(counts[e]))
            counts[hottest] += 1
            owners.append(hottest)
        ranks = [owners[:i].count(e) for i, e in enumerate(owners)]
        per_replica = [F32(load_E[e]) / F32(counts[e]) for e in owners]
        for pack in packed(per_replica, servers // nodes):
            on_servers.append([(owners[i], ranks[i]) for i in pack])
    return counts, on_servers


@st.composite
def legal(draw: st.DrawFn) -> tuple[npt.NDArray[np.float64], int, int, int, int]:
    nodes, groups = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2, 4, 6]))
    experts, servers = groups * draw(st.integers(1, 5)), nodes * draw(st.integers(1, 3))
    replicas = (-(-experts // servers) + draw(st.integers(0, 3))) * servers
    loads = st.one_of(st.integers(0, 6).map(float), st.floats(0, 1e6, width=32))
    weight = draw(hnp.arrays(np.float64, (2, experts), elements=loads))
    return weight, replicas, groups, nodes, servers


@settings(max_examples=200)
@given(legal())
# All further replicas are the first expert's, as with DeepSeek's; each on a server of its own.
@example((np.zeros((2, 4)), 8, 1, 1, 4))
def test_counts_and_loads_are_those_of_the_slow_one(given_) -> None:
    weight, replicas, groups, nodes, servers = given_
    phy2log, log2phy, logcnt = rebalance_experts(*given_)
    per_server = phy2log.reshape(2, servers, -1)
    for layer in range(2):
        load_E = weight[layer].tolist()
        counts, on_servers = oracle(load_E, replicas, groups, nodes, servers)
        assert logcnt[layer].tolist() == counts
        for server, pairs in enumerate(on_servers):
            expected = sorted(load_E[e] / counts[e] for e, _ in pairs)
            found = sorted(load_E[e] / counts[e] for e in per_server[layer, server].tolist())
            assert sum(found) == pytest.approx(sum(expected), rel=1e-9, abs=1e-12)
        # Nobody is parted that could stay, and nobody stays that equal loads could part.
        assert doubles(per_server[layer]) <= doubles(
            np.array([[e for e, _ in pairs] for pairs in on_servers])
        )
    assert_drop_in_shapes(phy2log, log2phy, logcnt, replicas)
    hierarchical = groups % nodes == 0
    found_plan = plan(
        "eplb-hierarchical" if hierarchical else "eplb",
        weight,
        servers,
        replicas,
        **({"groups": groups, "nodes": nodes} if hierarchical else {}),
    )
    load_LS = np.take_along_axis(weight / logcnt, phy2log, 1).reshape(2, servers, -1).sum(axis=2)
    mean_L = load_LS.mean(axis=1)
    expected_L = np.where(mean_L > 0, load_LS.max(axis=1) / np.where(mean_L > 0, mean_L, 1), 1)
    np.testing.assert_allclose(found_plan.par_L, expected_L, rtol=1e-9)


def doubles(experts_SP: npt.NDArray[np.int64]) -> int:
    return sum(len(row) - len(set(row)) for row in experts_SP.tolist())


def assert_drop_in_shapes(
    phy2log: npt.NDArray[np.int64],
    log2phy: npt.NDArray[np.int64],
    logcnt: npt.NDArray[np.int64],
    replicas: int,
) -> None:
    layers, experts = logcnt.shape
    assert phy2log.shape == (layers, replicas)
    assert log2phy.shape == (layers, experts, logcnt.max())
    assert {phy2log.dtype, log2phy.dtype, logcnt.dtype} == {np.dtype(np.int64)}
    assert (logcnt.sum(axis=1) == replicas).all()
    for layer in range(layers):
        for expert in range(experts):
            row = log2phy[layer, expert]
            count = logcnt[layer, expert]
            assert (phy2log[layer, row[:count]] == expert).all()
            assert len(set(row[:count].tolist())) == count
            assert (row[count:] == -1).all()


def test_the_published_example() -> None:
    phy2log, log2phy, logcnt = rebalance_experts(WEIGHT, 16, 4, 2, 8)
    assert phy2log.tolist() == PHY2LOG
    assert_drop_in_shapes(phy2log, log2phy, logcnt, 16)
    # By rank, which is by creation: the first replica of expert 1 is packed last.
    assert log2phy[0, 1].tolist() == [15, 13]
    assert plan("eplb-hierarchical", WEIGHT, 8, 16, groups=4, nodes=2).holds_LSE.sum() == 32


@settings(max_examples=100)
@given(
    weight=hnp.arrays(np.float64, (2, 9), elements=st.integers(0, 30).map(float)),
    replicas=st.integers(9, 36),
)
def test_any_number_of_replicas(weight: npt.NDArray[np.float64], replicas: int) -> None:
    phy2log, log2phy, logcnt = rebalance_experts(weight, replicas, 1, 1, 4)
    assert_drop_in_shapes(phy2log, log2phy, logcnt, replicas)
    if replicas % 4:
        sizes = [replicas // 4 + (s < replicas % 4) for s in range(4)]
        for row in phy2log:
            for mine in np.split(row, np.cumsum(sizes)[:-1]):
                assert len(set(mine.tolist())) == len(mine)


def test_faster_servers_get_more() -> None:
    found = plan("eplb", np.ones((1, 64)), 2, [16, 48], speeds_S=[1.0, 3.0])
    assert found.holds_LSE[0].sum(axis=1).tolist() == [16, 48]
    assert found.par_L[0] == 1
    # One slot more on each: nobody needs it on the slow server, which stays at its share.
    roomy = plan("eplb", np.ones((1, 64)), 2, [17, 49], speeds_S=[1.0, 3.0])
    assert roomy.par_L[0] < 1.05


def test_nodes_of_different_sizes() -> None:
    rng = np.random.default_rng(1)
    load_LE = rng.random((3, 24))
    found = plan("eplb-hierarchical", load_LE, 4, [9, 8, 7, 7], groups=4, nodes=2)
    for layer in range(3):
        nodes_of = found.holds_LSE[layer].reshape(2, 2, 24).any(axis=1)
        # Each group of 6 is on one node as a whole.
        assert (nodes_of.sum(axis=0) == 1).all()
        assert (nodes_of.reshape(2, 4, 6).all(axis=2).sum(axis=0) == 1).all()


@pytest.mark.parametrize("dtype", ["int64", "int32", "uint8", "float32", "bfloat16", "float16"])
def test_tensors_come_back_as_tensors(dtype: str) -> None:
    weight = torch.tensor(WEIGHT).to(getattr(torch, dtype))
    if weight.is_floating_point():
        weight.requires_grad_()
    expected = rebalance_experts(weight.detach().double().numpy(), 16, 4, 2, 8)
    # A column-major tensor, which NumPy would read without a copy.
    for given_ in (weight, weight.t().contiguous().t()):
        found = rebalance_experts(given_, 16, 4, 2, 8)
        for tensor, array in zip(found, expected, strict=True):
            assert isinstance(tensor, torch.Tensor)
            assert (tensor.dtype, tensor.device.type) == (torch.int64, "cpu")
            assert not tensor.requires_grad
            assert tensor.tolist() == array.tolist()


def test_a_float16_array_holds_loads_of_its_whole_range() -> None:
    loads = np.array([[65504, 1, 2, 3]], np.float16)
    assert rebalance_experts(loads, 6, 1, 1, 3)[2].tolist() == [[3, 1, 1, 1]]
    assert plan("eplb", loads, 3, 6).par_L[0] == pytest.approx(1, rel=1e-4)


def test_sglang_chooses_the_policy_itself() -> None:
    def counts(groups: int | None, hierarchical: bool | None) -> Any:
        return rebalance_experts(
            weight=np.arange(8)[None],
            num_replicas=12,
            num_groups=groups,
            num_nodes=2,
            num_gpus=4,
            enable_hierarchical=hierarchical,
        )[2].tolist()

    assert counts(2, True) == counts(2, None) != counts(2, False) == counts(None, False)
    with pytest.raises(ValueError, match="num_groups is 1, must be a multiple of 2 nodes"):
        counts(1, True)
    with pytest.raises(ValueError, match="num_groups is None"):
        counts(None, None)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((np.ones((1, 4)), 3, 1, 1, 1), "num_replicas: 3 replicas cannot cover 4"),
        ((np.ones((1, 4)), 4, 0, 1, 1), "num_groups is 0"),
        ((np.ones((1, 4)), 4, 1, 0, 1), "num_nodes is 0"),
        ((np.ones((1, 4)), 4, 1, 1, 0), "num_gpus is 0"),
        ((np.ones((1, 4)), 4, 3, 1, 1), "num_groups is 3"),
        ((np.ones((1, 4)), 6, 2, 2, 3), "num_nodes is 2"),
        ((np.ones((1, 2)), 7, 1, 1, 3), "num_replicas is 7"),
        ((np.ones(4), 4, 1, 1, 1), "weight has shape"),
        ((-np.ones((1, 4)), 4, 1, 1, 1), "weight has numbers"),
        ((torch.full((1, 4), torch.nan), 4, 1, 1, 1), "weight has numbers"),
        ((torch.full((1, 4), torch.inf).bfloat16(), 4, 1, 1, 1), "weight has numbers"),
        ((torch.ones(1, 4, dtype=torch.bool), 4, 1, 1, 1), "weight has bool"),
        ((torch.ones(1, 4, dtype=torch.cfloat), 4, 1, 1, 1), "weight has complex64"),
        ((torch.ones(1, 4, device="meta"), 4, 1, 1, 1), "weight: .* meta"),
        ((torch.ones(1, 4).to_sparse(), 4, 1, 1, 1), "weight: .* Sparse"),
        ((torch.ones(0, 4), 4, 1, 1, 1), "weight has shape"),
        ((np.ones((1, 4)), 4.0, 1, 1, 1), "num_replicas is 4.0, must be a whole number"),
        ((np.ones((1, 4)), True, 1, 1, 1), "num_replicas is True"),
        ((np.ones((1, 4)), 1 << 40, 1, 1, 1), "num_replicas is 1099511627776"),
        ((np.ones((1, 4)), 4, "1", 1, 1), "num_groups is '1'"),
        ((np.ones((1, 4)), 4, 1, 1.5, 1), "num_nodes is 1.5"),
        ((np.ones((1, 4)), 4, 1, 1, None), "num_gpus is None"),
    ],
)
def test_wrong_arguments_are_named(arguments: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        rebalance_experts(*arguments)
