"""Blocks of the paged cache: who has which, what is shared, what is reused."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attention_client.generation.blocks import BlockPools, Kind

PAGE = 4


def pools(blocks: int = 8, window: int = 0) -> BlockPools:
    return BlockPools([Kind(window, blocks, 64)], PAGE)


def admit(of: BlockPools, name: str, tokens: list[int], spare: int = 0) -> int | None:
    return of.admit(name, tokens, spare, of.digests(tokens))


def test_computed_blocks_are_shared_up_to_the_last_token() -> None:
    of, tokens = pools(), list(range(12))
    assert admit(of, "a", tokens) == 0
    assert admit(of, "b", tokens) is None, "it waits for what is computed now"
    of.computed("a", tokens, 9)
    assert admit(of, "c", tokens) == 8
    assert of.tables("c")[0][:2] == of.tables("a")[0][:2]
    of.release("a")
    of.release("c")
    # One token is computed in any case.
    assert admit(of, "d", tokens[:8]) == 4
    assert admit(of, "e", [9, *tokens[1:]]) == 0


def test_nobody_waits_for_a_sequence_that_left() -> None:
    of, tokens = pools(), list(range(12))
    admit(of, "a", tokens)
    of.computed("a", tokens, 6)
    assert admit(of, "b", tokens) is None
    of.release("a")
    assert admit(of, "b", tokens) == 4


def test_the_longest_unused_block_is_reused_first_and_a_prefix_from_its_end() -> None:
    of = pools(blocks=7)
    for name, first in (("a", 0), ("b", 100)):
        tokens = list(range(first, first + 12))
        admit(of, name, tokens)
        of.computed(name, tokens, 12)
        of.release(name)
    assert admit(of, "new", [7] * 8) == 0  # a free block and the last one of "a"
    of.release("new")
    assert admit(of, "a", list(range(13))) == 8
    of.release("a")
    assert admit(of, "b", [*range(100, 112), 1]) == 12


def test_a_window_needs_a_ring_of_blocks() -> None:
    of = pools(blocks=6, window=10)
    assert of.capacity is None
    assert admit(of, "a", list(range(100)), spare=50) == 0, "a ring never grows"
    assert len(of.tables("a")[0]) == 3
    assert of.extend("a", 1000)
    assert len(of.tables("a")[0]) == 3
    of.computed("a", list(range(100)), 100)
    assert admit(of, "b", list(range(100))) == 0, "rings are not shared"
    assert admit(of, "c", [1]) is None
    assert of.usage() == 1.0


def test_kinds_are_given_together_or_not_at_all() -> None:
    of = BlockPools([Kind(0, 10, 64), Kind(8, 2, 64)], PAGE)
    assert of.capacity == 40
    assert admit(of, "a", list(range(20))) == 0
    assert [len(table) for table in of.tables("a")] == [5, 2]
    assert admit(of, "b", [1]) is None
    of.release("a")
    assert admit(of, "b", [1], spare=1) == 0
    assert not of.extend("b", 41)
    assert [len(table) for table in of.tables("b")] == [1, 1]


@given(st.integers(0, 10**6), st.integers(4, 20), st.sampled_from([0, 6]))
def test_no_block_has_two_contents(seed: int, blocks: int, window: int) -> None:
    """Each block that sequences share holds the same tokens for all; none is lost."""
    dice, of = random.Random(seed), pools(blocks, window)
    held: dict[str, list[int]] = {}
    for step in range(60):
        action = dice.random()
        if action < 0.5:
            tokens = [dice.randrange(2) for _ in range(dice.randint(1, 16))]
            known = admit(of, str(step), tokens)
            if known is not None:
                assert known < len(tokens)
                held[str(step)] = tokens
                of.computed(str(step), tokens, dice.randint(known, len(tokens)))
        elif held:
            name = dice.choice(list(held))
            if action < 0.75:
                tokens = held[name]
                if of.extend(name, len(tokens) + 1):
                    tokens.append(dice.randrange(2))
            else:
                of.release(name)
                del held[name]
        contents: dict[int, tuple[int, ...]] = {}
        for name, tokens in held.items():
            [table] = of.tables(name)
            assert len(table) >= -(-min(len(tokens), window or len(tokens)) // PAGE)
            assert len(set(table)) == len(table)
            for place, block in enumerate(table):
                content = tuple(tokens[: (place + 1) * PAGE]) if not window else (hash(name),)
                assert contents.setdefault(block, content) == content
        assert of.usage() == pytest.approx(len(contents) / blocks)
    for name in held:
        of.release(name)
    assert of.usage() == 0
