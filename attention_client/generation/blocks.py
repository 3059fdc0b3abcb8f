"""Which blocks of the paged key-value cache each sequence has (PagedAttention, Kwon et al. 2023, section 4).

Pure bookkeeping: no tensors. Layers of one kind share a pool of blocks. A kind without a window gives a
sequence a block for each `page` tokens. A kind with a window gives it a ring of blocks, which its tokens
overwrite.

Sequences share blocks with the same tokens from the beginning on, if no kind has a window. A block that no
sequence has stays as it is until a sequence needs it, the longest unused one first.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence as Items
from dataclasses import dataclass

__all__ = ["BlockPools", "Kind"]


@dataclass(frozen=True)
class Kind:
    """Layers whose tokens lie in the same blocks.

    Attributes:
        window: Tokens that a token sees, itself included; 0: all before it.
        blocks: Blocks of the pool.
        block_bytes: Bytes of a block, of all its layers together.
    """

    window: int
    blocks: int
    block_bytes: int

    def needed(self, tokens: int, page: int) -> int:
        """Return the blocks of a sequence of so many tokens."""
        return -(-(min(tokens, self.window) if self.window else tokens) // page)


class _Pool:
    """The blocks of one kind, and what those hold that are free but still useful."""

    def __init__(self, blocks: int) -> None:
        self._free = list(range(blocks - 1, -1, -1))
        self._users = [0] * blocks
        # Content of complete blocks, both ways, and those of them without a user, longest unused first.
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        self._unused: OrderedDict[int, None] = OrderedDict()

    @property
    def room(self) -> int:
        """Blocks that no sequence has."""
        return len(self._free) + len(self._unused)

    def take(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._unused.popitem(last=False)
            del self._block_of[self._digest_of.pop(block)]
        self._users[block] = 1
        return block

    def give_back(self, block: int) -> None:
        self._users[block] -= 1
        if not self._users[block]:
            if block in self._digest_of:
                self._unused[block] = None
            else:
                self._free.append(block)

    def find(self, digests: Items[bytes]) -> list[int]:
        """Return the blocks with these contents, up to the first that no block has."""
        found = []
        for digest in digests:
            block = self._block_of.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def unused(self, blocks: Items[int]) -> int:
        return sum(not self._users[block] for block in blocks)

    def share(self, block: int) -> None:
        self._unused.pop(block, None)
        self._users[block] += 1

    def complete(self, block: int, digest: bytes) -> None:
        """Let later sequences find this block, unless another one has the same content."""
        if block not in self._digest_of and digest not in self._block_of:
            self._block_of[digest] = block
            self._digest_of[block] = digest


@dataclass
class _Held:
    """What one sequence has.

    Attributes:
        tables: Its blocks of each kind.
        digests: Of its complete blocks that are computed.
        promised: Of the complete blocks that it computes next. Other sequences wait for them.
    """

    tables: list[list[int]]
    digests: list[bytes]
    promised: list[bytes]


class BlockPools:
    """The blocks of all kinds of layers.

    Args:
        kinds: The kinds.
        page: Tokens of a block.
    """

    def __init__(self, kinds: Items[Kind], page: int) -> None:
        self._kinds, self._page = tuple(kinds), page
        self._pools = [_Pool(kind.blocks) for kind in kinds]
        self._held: dict[str, _Held] = {}
        self._promised: set[bytes] = set()
        self._shares = not any(kind.window for kind in kinds)

    @property
    def capacity(self) -> int | None:
        """Most tokens of one sequence; None: no limit, since all kinds have windows that fit."""
        limits = [
            kind.blocks * self._page
            for kind in self._kinds
            if not kind.window or kind.needed(kind.window, self._page) > kind.blocks
        ]
        return min(limits, default=None)

    def usage(self) -> float:
        """Return the fraction of the memory that sequences have, 0 to 1."""
        total = sum(kind.blocks * kind.block_bytes for kind in self._kinds)
        free = sum(
            pool.room * kind.block_bytes
            for pool, kind in zip(self._pools, self._kinds, strict=True)
        )
        return 1 - free / total

    def tables(self, name: str) -> list[list[int]]:
        """Return the blocks of a sequence for each kind, in the order of its tokens."""
        return self._held[name].tables

    def admit(self, name: str, tokens: list[int], spare: int, digests: list[bytes]) -> int | None:
        """Give a new sequence the blocks of its tokens, if they are free.

        Args:
            name: The sequence.
            tokens: Its tokens.
            spare: Blocks that must stay free after it, so that others can grow. Windows do not grow.
            digests: Of its complete blocks that it may share with others (`digests`).

        Returns:
            Its first tokens that are computed already, fewer than all; None: too few blocks are free, or
            another sequence is about to compute its next block, as for the choices of one prompt.
        """
        shared = self._pools[0].find(digests) if digests else []
        promised = digests[len(shared) :]
        if promised and promised[0] in self._promised:
            return None
        for kind, pool in zip(self._kinds, self._pools, strict=True):
            new = kind.needed(len(tokens), self._page) - len(shared)
            if new + pool.unused(shared) + (0 if kind.window else spare) > pool.room:
                return None
        for block in shared:
            # Kinds without a window are one kind: all their layers share its pool.
            self._pools[0].share(block)
        tables = [list(shared) for _ in self._kinds]
        self._held[name] = _Held(tables, digests[: len(shared)], promised)
        self._promised.update(promised)
        extended = self.extend(name, len(tokens))
        assert extended
        return len(shared) * self._page

    def digests(self, tokens: list[int]) -> list[bytes]:
        """Return the digests of a sequence's complete blocks, without the last token: it computes that."""
        return self._extended([], tokens[:-1]) if self._shares else []

    def extend(self, name: str, tokens: int) -> bool:
        """Give a sequence the blocks for so many tokens in all; False: too few are free, and it gets none."""
        tables = self._held[name].tables
        missing = [
            kind.needed(tokens, self._page) - len(table)
            for kind, table in zip(self._kinds, tables, strict=True)
        ]
        if any(new > pool.room for new, pool in zip(missing, self._pools, strict=True)):
            return False
        for table, new, pool in zip(tables, missing, self._pools, strict=True):
            table += [pool.take() for _ in range(new)]
        return True

    def computed(self, name: str, tokens: list[int], count: int) -> None:
        """Let later sequences share the complete blocks among the first `count` tokens of this one."""
        held = self._held[name]
        if not self._shares or count // self._page == len(held.digests):
            return
        before = len(held.digests)
        held.digests = self._extended(held.digests, tokens[:count])
        for place in range(before, len(held.digests)):
            self._pools[0].complete(held.tables[0][place], held.digests[place])
            self._promised.discard(held.digests[place])

    def release(self, name: str) -> None:
        """Free the blocks of a sequence; no effect on an unknown one."""
        held = self._held.pop(name, None)
        if held is not None:
            self._promised.difference_update(held.promised)
            for table, pool in zip(held.tables, self._pools, strict=True):
                # The end of a prefix is of use only with its beginning, so it is reused first.
                for block in reversed(table):
                    pool.give_back(block)

    def _extended(self, known: list[bytes], tokens: list[int]) -> list[bytes]:
        """Return the digest of each complete block and all before it, of which the first are known."""
        found = list(known)
        for place in range(len(known), len(tokens) // self._page):
            digest = hashlib.blake2b(found[-1] if found else b"", digest_size=16)
            digest.update(
                array("q", tokens[place * self._page : (place + 1) * self._page]).tobytes()
            )
            found.append(digest.digest())
        return found
