"""The inputs of a forward pass, for attention that reads the paged cache through block tables.

transformers builds masks and a list with the place of every cached token, at each step. Here a step costs as
much as the sequences have blocks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingIOs
from transformers.generation.continuous_batching.requests import TMP_TOKEN_ID

__all__ = ["PagedBatch", "Sequences"]


class Sequences(NamedTuple):
    """The sequences of a forward pass and their places in the cache.

    Attributes:
        begins: int32 (S + 1): first token of each sequence in the pass, and the end.
        past: int32 (S): tokens of each sequence in the cache.
        tables: int32 (S, blocks): the blocks of each sequence, for each of the cache's allocators.
    """

    begins: torch.Tensor
    past: torch.Tensor
    tables: tuple[torch.Tensor, ...]

    def part(self, part: slice) -> Sequences:
        """Return some of the sequences, whose tokens begin at 0."""
        begins = self.begins[part.start : part.stop + 1]
        tables = tuple(table[part] for table in self.tables)
        return Sequences(begins - begins[0], self.past[part], tables)


class PagedBatch(ContinuousBatchingIOs):  # type: ignore[misc]
    """transformers' inputs and outputs of a step, without masks and index lists.

    Attributes:
        sequences: The sequences of the next pass.
    """

    sequences: Sequences

    def prepare_batch_tensors(
        self,
        requests_in_batch: list[Any],
        logits_processors: Any,
        use_decode_fast_path: bool,
        num_q_tokens: int,
        max_kv_read: int,
        use_padding: bool,
    ) -> None:
        """Prepare the next forward pass of these requests (transformers' `FutureRequestState`)."""
        self.requests_in_batch = requests_in_batch
        self.num_request_in_batch = len(requests_in_batch)
        tokens: list[int] = []
        past: list[int] = []
        begins = [0]
        last_tokens: list[int] = []
        for future in requests_in_batch:
            state = future.state
            past.append(state.position_offset)
            state.position_offset += future.query_length
            tokens += state.tokens_to_process
            begins.append(begins[-1] + future.query_length)
            if future.has_new_token:
                last_tokens.append(begins[-1] - 1)
                state.tokens_to_process = [TMP_TOKEN_ID]
        self.num_q_tokens = len(tokens)
        self._set(self.input_ids, np.array(tokens, np.int32))
        begins_S = np.array(begins, np.int32)
        positions_T = np.arange(len(tokens), dtype=np.int32)
        shift_S = np.array(past, np.int32) - begins_S[:-1]
        self._set(self.position_ids, positions_T + np.repeat(shift_S, np.diff(begins_S)))
        unused = [0] * (len(past) - len(last_tokens))
        self._set(self.logits_indices, np.array(last_tokens + unused, np.int32))
        self.sequences = Sequences(
            torch.from_numpy(begins_S),
            torch.tensor(past, dtype=torch.int32),
            tuple(map(self._tables_of, self.cache.cache_allocators.values())),
        )
        logits_processors.prepare_tensor_args(
            requests_in_batch=requests_in_batch,
            arg_storage=self._bulk_input_tensor[self.static_inputs :],
        )

    def get_model_kwargs(self, use_padding: bool = False) -> dict[str, Any]:
        """Return the keyword arguments of `PagedModel`, and what transformers reads for the sampling."""
        tokens, sequences = self.num_q_tokens, self.num_request_in_batch
        return {
            "input_ids": self.input_ids[:tokens][None],
            "position_ids": self.position_ids[:tokens][None],
            "logits_indices": self.logits_indices[:sequences],
            "logits_processor_args": self._bulk_input_tensor[self.static_inputs :, :sequences],
            "max_length_k": {},  # transformers' warm-up writes to it
        }

    def _tables_of(self, allocator: Any) -> torch.Tensor:
        rows = [allocator.block_table[future.state.request_id] for future in self.requests_in_batch]
        tables = np.zeros((len(rows), max(map(len, rows))), np.int32)
        for table, row in zip(tables, rows, strict=True):
            table[: len(row)] = row
        return torch.from_numpy(tables)

    @staticmethod
    def _set(storage: torch.Tensor, values: Any) -> None:
        storage[: len(values)] = torch.from_numpy(values)
