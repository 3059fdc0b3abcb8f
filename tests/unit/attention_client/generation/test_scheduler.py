"""The scheduler without a model: what passes compute, who is admitted, who is evicted."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attention_client.generation.blocks import BlockPools, Kind
from attention_client.generation.prefill_target import PrefillTarget
from attention_client.generation.scheduler import Part, Scheduler, Sequence
from eaas.generation.sampling import GREEDY, Sampling
from eaas.generation.work import Work

PAGE = 4
END = 99


class Queue:
    """First come, first served; the evicted before all others."""

    def __init__(self, most: int = 100) -> None:
        self.most = most
        self.names: list[str] = []

    def arrive(self, request: str, tokens: list[int], running: int) -> None:
        self.names.append(request)

    def put_back(self, request: str) -> None:
        self.names.insert(0, request)

    def candidates(self, running: list[Sequence]) -> list[str]:
        return self.names[: max(0, self.most - len(running))]

    def admit(self, requests: Iterable[str]) -> None:
        for request in requests:
            self.names.remove(request)

    def leave(self, request: str) -> None:
        if request in self.names:
            self.names.remove(request)


def scheduler(
    blocks: int = 100, max_tokens: int = 16, most: int = 100, target: PrefillTarget | None = None
) -> Scheduler:
    pools = BlockPools([Kind(0, blocks, 64)], PAGE)
    return Scheduler(pools, Queue(most), max_tokens, target or PrefillTarget(0.0))


def sequence(
    name: str, prompt: int, answer: int = 5, first: int = 0, sampling: Sampling = GREEDY
) -> Sequence:
    return Sequence(
        Work(name, list(range(first, first + prompt)), prompt, answer, (END,), sampling)
    )


def shown(parts: list[Part]) -> list[tuple[str, int, int, bool]]:
    return [(part.sequence.id, part.begin, part.end, part.samples) for part in parts]


def run(of: Scheduler, token: int = 7) -> list[tuple[str, int, int, bool]]:
    """Compute one pass; sequences that end leave."""
    parts = of.step()
    of.advance(parts, [token if part.samples else None for part in parts])
    for part in parts:
        if part.samples and part.sequence.is_finished:
            of.remove(part.sequence.id)
    return shown(parts)


def test_prompts_that_wait_are_prefilled_together_in_chunks() -> None:
    of = scheduler(max_tokens=16)
    for index in range(3):
        of.add(sequence(str(index), 7, first=100 * index))
    assert run(of) == [("0", 0, 7, True), ("1", 0, 7, True), ("2", 0, 2, False)]
    assert run(of) == [("0", 7, 8, True), ("1", 7, 8, True), ("2", 2, 7, True)]


def test_answers_come_before_prompts() -> None:
    of = scheduler(max_tokens=4)
    of.add(sequence("a", 4, answer=3))
    run(of)
    of.add(sequence("long", 50, first=200))
    assert run(of) == [("a", 4, 5, True), ("long", 0, 3, False)]
    assert run(of) == [("a", 5, 6, True), ("long", 3, 6, False)]
    assert run(of) == [("long", 6, 10, False)]


def test_choices_of_one_prompt_compute_it_once() -> None:
    of = scheduler(max_tokens=8)
    for name in "abc":
        of.add(sequence(name, 11))
    assert run(of) == [("a", 0, 8, False)]
    assert run(of) == [("a", 8, 11, True), ("b", 8, 11, True), ("c", 8, 10, False)]


def test_a_known_beginning_is_not_computed_again() -> None:
    of = scheduler(max_tokens=100)
    of.add(sequence("a", 10))
    run(of)
    of.add(sequence("b", 10))
    assert run(of)[1:] == [("b", 8, 10, True)]
    of.add(sequence("scored", 10, sampling=Sampling(logprobs=0, prompt_logprobs=True)))
    assert run(of)[2:] == [("scored", 0, 10, True)]


def test_an_end_token_and_the_limit_end_an_answer() -> None:
    of = scheduler()
    of.add(sequence("a", 3))
    run(of, token=END)
    assert not of.running
    of.add(sequence("b", 3, answer=2))
    run(of)
    run(of)
    assert not of.running


def test_the_last_one_is_evicted_and_comes_back_with_its_answer() -> None:
    of = scheduler(blocks=4, max_tokens=100)
    of.add(sequence("a", 6, answer=9))
    of.add(sequence("b", 6, answer=9, first=50))
    assert len(run(of)) == 1, "the second one would be evicted at once"
    of = scheduler(blocks=5, max_tokens=100)
    of.add(sequence("a", 6, answer=9))
    of.add(sequence("b", 6, answer=9, first=50))
    assert [len(run(of)) for _ in range(4)] == [2, 2, 2, 1]
    of.add(sequence("c", 3, answer=1, first=80))
    passes = []
    while of.running or of.waiting:
        passes.append(run(of))
    back = next(parts for parts in passes if any(part[0] == "b" for part in parts))
    assert ("b", 4, 9, True) in back, "its first block is still there"
    order = [part[0] for parts in passes for part in parts]
    assert order.index("b") < order.index("c")


def test_a_sequence_that_waits_and_leaves_makes_no_room() -> None:
    of = scheduler(blocks=5, max_tokens=100)
    of.add(sequence("a", 6, answer=9))
    of.add(sequence("b", 6, answer=9, first=50))
    assert [len(run(of)) for _ in range(4)] == [2, 2, 2, 1]
    of.add(sequence("c", 1, answer=1, first=80))
    of.remove("c")
    of.remove("unknown")
    assert [part[0] for part in run(of)] == ["a"]


@given(
    st.integers(0, 10**6),
    st.integers(8, 30),
    st.sampled_from([1, 5, 64]),
    st.integers(1, 6),
)
def test_every_sequence_ends_and_every_token_is_computed_in_order(
    seed: int, blocks: int, max_tokens: int, most: int
) -> None:
    dice = random.Random(seed)
    of = scheduler(blocks, max_tokens, most)
    left = [
        sequence(str(i), dice.randint(1, 16), dice.randint(1, 12), dice.choice((0, 1000)))
        for i in range(12)
    ]
    everyone, gone = list(left), set()
    for _ in range(3000):
        if left and dice.random() < 0.3:
            of.add(left.pop())
        before = {each.id: each.computed for each in of.running.values()}
        parts = of.step()
        answers = [part for part in parts if not part.is_prefill]
        assert len(of.running) <= most
        assert sum(part.size for part in parts) <= max(max_tokens, len(answers))
        names = [part.sequence.id for part in parts]
        assert len(set(names)) == len(names)
        for part in parts:
            assert part.size > 0
            assert part.begin == part.sequence.computed
            assert before.get(part.sequence.id, part.begin) == part.begin
        of.advance(parts, [dice.choice((7, 7, 7, END)) if p.samples else None for p in parts])
        for part in parts:
            if part.samples and (part.sequence.is_finished or dice.random() < 0.02):
                of.remove(part.sequence.id)
                gone.add(part.sequence.id)
        if not (left or of.running or of.waiting):
            break
    assert gone == {each.id for each in everyone}


def learned(target_s: float) -> PrefillTarget:
    target = PrefillTarget(target_s)
    for _ in range(50):
        target.observe(4, 0, 0.020)
        for chunk in (16, 64, 256, 1024):
            target.observe(4, chunk, 0.020 + chunk * 0.001)
    return target


def with_costly_small_chunks() -> PrefillTarget:
    target = PrefillTarget(0.3)
    target.observe(4, 0, 0.001)
    for _ in range(50):
        for chunk, seconds in ((1024, 1.024), (300, 0.6), (140, 0.28)):
            target.observe(4, chunk, seconds)
    return target


def with_one_slow_pass() -> PrefillTarget:
    target = learned(0.120)
    target.observe(4, 64, 10.0)
    return target


@pytest.mark.parametrize(
    ("target", "least", "most"),
    [
        (learned(0.120), 80, 100),
        (with_costly_small_chunks(), 100, 150),  # 300 would take 0.6 s
        (learned(0.001), 16, 16),  # There is always progress.
        (with_one_slow_pass(), 40, 100),
    ],
)
def test_a_pass_takes_as_long_as_wanted(target: PrefillTarget, least: int, most: int) -> None:
    limit = target.limit(4, 2)
    assert limit is not None
    assert least <= limit <= most


@pytest.mark.parametrize(
    ("target_s", "answers", "prompts"),
    # With more prompts than answers throughput wins; nothing is wanted.
    [(0.120, 4, 5), (0.120, 0, 1), (0.0, 4, 2)],
)
def test_passes_without_a_limit(target_s: float, answers: int, prompts: int) -> None:
    assert learned(target_s).limit(answers, prompts) is None


def test_without_figures_of_prompts_there_is_no_limit() -> None:
    target = PrefillTarget(0.1)
    assert target.limit(4, 2) is None
    # A slow pass of answers does not make prompts free.
    target.observe(4, 0, 2.0)
    target.observe(4, 16, 0.1)
    assert target.limit(4, 2) is None
