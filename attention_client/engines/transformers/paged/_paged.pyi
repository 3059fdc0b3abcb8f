import torch

reads_tensors: int
"""Whether this torch has DLPack's C exchange interface, without which `attend` refuses its tensors."""

class Pool:
    """Threads that share the work of `attend`; a capsule."""

def pool(threads: int, /) -> Pool:
    """Start threads for `attend`. They end with the object.

    They learn which batches the caller computes sooner alone.

    Args:
        threads: With the caller.

    Raises:
        ValueError: Fewer than 1.
        OSError: They cannot be started.
    """

def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    tables: torch.Tensor,
    begins: torch.Tensor,
    past: torch.Tensor,
    block_rows: int,
    page: int,
    window: int,
    scale: float,
    softcap: float,
    sinks: torch.Tensor | None,
    pool: Pool | None,
    /,
) -> None:
    """Attend from a batch's new tokens to their sequences, and write their keys and values to the cache.

    The cost grows with each sequence's own length (online softmax, Milakov and Gimelshein, 2018).

    Args:
        q: (1, heads, T, D), float32 or bfloat16.
        k: (1, kv_heads, T, D).
        v: (1, kv_heads, T, V). D and V are at most 576.
        out: (1, T, heads, V), contiguous; written.
        k_cache: (rows, kv_heads, D): row table[p // page] * block_rows + p % page has position p. Heads may
            share their memory (stride 0), here and in k; so may keys and values.
        v_cache: (rows, kv_heads, V), likewise.
        tables: int32 (S, blocks): each sequence's blocks.
        begins: int32 (S + 1): first new token of each sequence, and the end.
        past: int32 (S): tokens of each sequence in the cache.
        block_rows: Rows from one block to the next.
        page: Tokens of a block.
        window: A token sees so many, itself included, and position p lies where p % window would; 0: all.
        scale: Factor of the products of queries and keys.
        softcap: Bound of the scores by tanh; 0.0: none.
        sinks: float32 (heads): a logit without a value in each head's softmax (gpt-oss); None: none.
        pool: Threads; None: the caller's alone. One call at a time.

    Raises:
        ValueError: A tensor has another shape or dtype, or a sequence lies beyond batch or cache.
    """
