"""The border to the compiled loops: what C could read or write out of bounds is refused."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.policies import compiled

L, S, E, P = 2, 3, 4, 5


def arrays() -> dict[str, Any]:
    """Of `place`, for one plan: two replicas of the first expert."""
    return {
        "load": np.ones((L, E)),
        "count": np.array([[[2, 1, 1, 1]] * L]),
        "slots": np.full((1, L, S), 2),
        "speed": np.ones(S),
        "single": False,
        "server": np.full((1, L, P), -1, dtype=np.int32),
    }


def rows(replicas: int) -> tuple[Any, ...]:
    """A sparse layout's arrays, of no replica on the first servers and all on the last."""
    first_X = np.zeros(L * S + 1, np.int64)
    first_X[-1] = replicas
    return first_X, np.zeros(replicas, np.int32), np.ones(replicas)


def test_fitting_arrays_are_filled() -> None:
    given_arrays = arrays()
    compiled.place(*given_arrays.values())
    assert set(given_arrays["server"].flat) == set(range(S))


@pytest.mark.parametrize("name", ["load", "count", "slots", "speed", "server"])
@pytest.mark.parametrize(
    "spoil",
    [
        lambda a: a[..., :-1].copy(),
        lambda a: np.concatenate([a, a[..., :1]], axis=-1),
        lambda a: a[None],
        lambda a: np.repeat(a, 2, axis=-1)[..., ::2],
        lambda a: a.astype(np.float32),
    ],
    ids=["short", "long", "deep", "gaps", "type"],
)
def test_an_array_of_another_size_or_type_is_refused(name, spoil) -> None:
    given_arrays = arrays()
    before = given_arrays["server"].copy()
    given_arrays[name] = spoil(given_arrays[name])
    if given_arrays["server"].shape == (1, L, P + 1):
        compiled.place(*given_arrays.values())  # There is more room than needed.
        return
    with pytest.raises(ValueError, match=r"place_layers, argument|out of range"):
        compiled.place(*given_arrays.values())
    assert name == "server" or (given_arrays["server"] == before).all()


@given(
    st.integers(-2, 4) | st.integers(-(2**61), 2**61), st.integers(0, L - 1), st.integers(0, E - 1)
)
def test_counts_beyond_the_room_are_refused(count: int, layer: int, expert: int) -> None:
    given_arrays = arrays()
    given_arrays["count"][0, layer, expert] = count
    if given_arrays["count"].min() >= 0 and given_arrays["count"].sum(axis=2).max() <= P:
        compiled.place(*given_arrays.values())
    else:
        with pytest.raises(ValueError, match="out of range"):
            compiled.place(*given_arrays.values())


@pytest.mark.parametrize("server", [-2, S, 2**31 - 1])
def test_servers_that_do_not_exist_are_refused(server: int) -> None:
    count_LE = np.ones((L, E), dtype=np.int64)
    server_LP = np.zeros((L, E), dtype=np.int32)
    server_LP[1, 2] = server
    shape = (L, S, E)
    for call in (
        lambda: compiled.sparse_of_compact(count_LE, server_LP, *rows(L * E)),
        lambda: compiled.refine(np.ones((L, E)), count_LE, np.ones(S), 1, server_LP),
        lambda: compiled.match(
            *(count_LE, server_LP, np.zeros(shape, np.bool_), np.zeros((L, S), np.int64)),
            *(False, np.empty((L, S), np.int64)),
        ),
    ):
        with pytest.raises(ValueError, match="out of range"):
            call()


def plan_fractional(
    slots: int = 2,
    room: int | None = None,
    *,
    moving: bool,
    current: tuple[Any, ...] = (None, None, None),
    nodes: list[int] | None = None,
) -> None:
    """Plan for one load, or for one iteration of loads that move together."""
    compiled.plan_fractional(
        None if moving else np.ones((1, L, E)),
        np.ones((L, 1, E), np.float32) if moving else None,
        *(np.full((L, S), slots), np.ones(S), *current),
        None if nodes is None else np.array(nodes, np.int32),
        *(0, 0.0, 1.0, *rows(max(L * S * slots, 0) if room is None else room)),
    )


@pytest.mark.parametrize("moving", [False, True])
def test_slots_that_do_not_suffice_are_refused(moving: bool) -> None:
    plan_fractional(moving=moving)
    for slots, room in ((1, None), (E + 1, None), (-1, L * S * 2), (2, L * S * 2 - 1)):
        with pytest.raises(ValueError, match="out of range"):
            plan_fractional(slots, room, moving=moving)


def test_nodes_are_numbered_and_for_one_load_only() -> None:
    plan_fractional(moving=False, nodes=[0, 0, 1])
    for moving, nodes in ((False, [0, -1, 1]), (True, [0, 0, 1])):
        with pytest.raises(ValueError, match="out of range"):
            plan_fractional(moving=moving, nodes=nodes)


def test_loads_are_needed() -> None:
    with pytest.raises(ValueError, match="out of range"):
        compiled.plan_fractional(
            *(None, None, np.full((L, S), 2), np.ones(S), None, None, None, None),
            *(0, 0.0, 1.0, *rows(L * S * 2)),
        )


def test_results_without_room_are_refused() -> None:
    count_LE, server_LP = np.ones((L, E), dtype=np.int64), np.zeros((L, E), dtype=np.int32)
    for off in (-1, 1):
        with pytest.raises(ValueError, match="out of range"):
            compiled.sparse_of_compact(count_LE, server_LP, *rows(L * E + off))
        with pytest.raises(ValueError, match="out of range"):
            compiled.sparse_of_holds(np.ones((L, S, E), np.bool_), None, *rows(L * S * E + off))


@pytest.mark.parametrize(
    ("begins", "experts"),
    [
        ([1, 2, 2, 2, 2, 2, 2], [0, 1]),  # does not begin at 0
        ([0, 2, 1, 2, 2, 2, 2], [0, 1]),  # goes back
        ([0, 3, 2, 2, 2, 2, 2], [0, 1]),  # beyond the replicas
        ([0, 1, 2, 2, 2, 2, 1], [0, 1]),  # does not end with them
        ([0, 2, 2, 2, 2, 2, 2], [1, 0]),  # descending
        ([0, 2, 2, 2, 2, 2, 2], [1, 1]),  # twice
        ([0, 2, 2, 2, 2, 2, 2], [0, E]),
        ([0, 2, 2, 2, 2, 2, 2], [-1, 0]),
    ],
)
def test_rows_that_are_wrong_are_refused(begins: list[int], experts: list[int]) -> None:
    current = (np.array(begins), np.array(experts, np.int32), np.ones(2))
    for moving in (False, True):
        with pytest.raises(ValueError, match="out of range"):
            plan_fractional(moving=moving, current=current)
    first_X, expert_N, _ = current
    if max(experts) < E:  # This one does not know the number of experts.
        with pytest.raises(ValueError, match="out of range"):
            compiled.sparse_new(first_X, expert_N, first_X, expert_N, np.empty(L * S + 1, np.int64))
