"""Tokens that `generate` still needs."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn
from transformers import EosTokenCriteria, GenerationConfig, StoppingCriteriaList

from attention_client.engines.transformers.live_rows import LiveRows


class FakeModel(nn.Module):
    """The parts of a transformers model that LiveRows uses; each step of `generate` adds a token per row."""

    def __init__(self, rows: LiveRows, lengths: list[int], **config: Any) -> None:
        super().__init__()
        self.rows, self.lengths = rows, torch.tensor(lengths)
        self.config = GenerationConfig(**config)
        self.has_end = True
        self.seen: list[list[bool] | None] = []

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> None:
        wanted_T = self.rows.wanted(input_ids.numel())
        self.seen.append(None if wanted_T is None else wanted_T.tolist())

    def _get_stopping_criteria(
        self, generation_config: GenerationConfig, *args: Any, **kwargs: Any
    ) -> StoppingCriteriaList:
        ends = _Ended(self)
        if not self.has_end:
            del ends.eos_token_id
        return StoppingCriteriaList([ends])

    def generate(
        self, mask_BT: torch.Tensor, assistant_model: Any = None, custom_generate: Any = None
    ) -> None:
        criteria = self._get_stopping_criteria(self.config)
        ids_BT = torch.zeros_like(mask_BT)
        self(input_ids=ids_BT, attention_mask=mask_BT)
        for step in range(int(self.lengths.max())):
            self.step = step
            criteria(ids_BT, None)
            mask_BT = torch.cat([mask_BT, torch.ones(len(mask_BT), 1, dtype=mask_BT.dtype)], dim=1)
            self(input_ids=ids_BT[:, -1:], attention_mask=mask_BT)


class _Ended(EosTokenCriteria):
    """End tokens that come after each row's length."""

    def __init__(self, model: FakeModel) -> None:
        super().__init__(0)
        self.model = model

    def __call__(self, ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return self.model.lengths <= self.model.step


def watched(lengths: list[int], **config: Any) -> FakeModel:
    rows = LiveRows()
    model = FakeModel(rows, lengths, **config)
    rows.attach(model)
    return model


FULL_22 = torch.ones(2, 2, dtype=torch.long)


def test_outside_generate_every_token_is_wanted() -> None:
    model = watched([1, 1])
    model(input_ids=FULL_22, attention_mask=torch.tensor([[0, 1], [1, 1]]))
    assert model.seen == [None]


def test_padding_is_not_wanted() -> None:
    model = watched([1, 1])
    model.generate(torch.tensor([[0, 1], [1, 1]]))
    assert model.seen == [[False, True, True, True], None]


def test_the_last_column_is_wanted_even_if_it_is_padding() -> None:
    model = watched([1, 3])
    model.generate(torch.tensor([[1, 0, 0], [1, 1, 0]]))
    assert model.seen[:2] == [[True, False, True, True, True, True], None]
    assert model.seen[2:] == [[False, True]] * 2


def test_an_ended_row_is_not_wanted() -> None:
    model = watched([1, 3])
    model.generate(FULL_22)
    assert model.seen == [None, None, [False, True], [False, True]]
    model.lengths = torch.tensor([2, 2])
    model.seen.clear()
    model.generate(FULL_22)  # Nothing of the last call is left.
    assert model.seen == [None, None, None]
    assert model.rows.wanted(2) is None


def test_a_row_that_ends_without_an_end_token_goes_on() -> None:
    model = watched([1, 3])
    model.has_end = False
    model.generate(torch.tensor([[0, 1], [1, 1]]))
    assert model.seen == [[False, True, True, True], None, None, None]


@pytest.mark.parametrize(
    ("config", "arguments"),
    [
        ({"num_beams": 2}, {}),
        ({}, {"assistant_model": object()}),
        ({"prompt_lookup_num_tokens": 3}, {}),
        ({}, {"custom_generate": print}),
        ({"return_dict_in_generate": True, "output_logits": True}, {}),
        ({"return_dict_in_generate": True, "output_hidden_states": True}, {}),
    ],
)
def test_where_more_is_read_every_token_is_wanted(
    config: dict[str, Any], arguments: dict[str, Any]
) -> None:
    model = watched([1, 3], **config)
    model.generate(torch.tensor([[0, 1], [1, 1]]), **arguments)
    assert model.seen == [None] * 4


def test_threads_are_independent() -> None:
    model, seen = watched([1, 3]), []

    def look(*_: object) -> None:
        other = threading.Thread(target=lambda: seen.append(model.rows.wanted(2)))
        other.start()
        other.join()

    model.register_forward_hook(look)
    model.generate(FULL_22)
    assert seen == [None] * 4
