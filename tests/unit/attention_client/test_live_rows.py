"""Tokens that `generate` still needs."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import torch
from torch import nn
from transformers import StoppingCriteriaList

from attention_client.engines.transformers.live_rows import LiveRows


class FakeModel(nn.Module):
    """The parts of a transformers model that LiveRows uses; each step of `generate` adds a token per row."""

    def __init__(self, rows: LiveRows, lengths: list[int], beams: int = 1) -> None:
        super().__init__()
        self.rows, self.lengths, self.beams = rows, torch.tensor(lengths), beams
        self.seen: list[list[bool] | None] = []

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> None:
        wanted_T = self.rows.wanted(input_ids.numel())
        self.seen.append(None if wanted_T is None else wanted_T.tolist())

    def _get_stopping_criteria(self, generation_config, *args, **kwargs):
        return StoppingCriteriaList([lambda ids, scores: torch.zeros(len(ids), dtype=torch.bool)])

    def generate(self, mask_BT: torch.Tensor) -> None:
        criteria = self._get_stopping_criteria(SimpleNamespace(num_beams=self.beams))
        ids_BT = torch.zeros_like(mask_BT)
        self(input_ids=ids_BT, attention_mask=mask_BT)
        for step in range(int(self.lengths.max())):
            done_B = self.lengths <= step
            criteria[0] = lambda ids, scores, done_B=done_B: done_B
            criteria(ids_BT, None)
            mask_BT = torch.cat([mask_BT, torch.ones(len(mask_BT), 1, dtype=mask_BT.dtype)], dim=1)
            self(input_ids=ids_BT[:, -1:], attention_mask=mask_BT)


def watched(lengths: list[int], beams: int = 1) -> FakeModel:
    rows = LiveRows()
    model = FakeModel(rows, lengths, beams)
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


def test_an_ended_row_is_not_wanted() -> None:
    model = watched([1, 3])
    model.generate(FULL_22)
    assert model.seen == [None, None, [False, True], [False, True]]
    model.lengths = torch.tensor([2, 2])
    model.seen.clear()
    model.generate(FULL_22)  # Nothing of the last call is left.
    assert model.seen == [None, None, None]
    assert model.rows.wanted(2) is None


def test_with_beams_all_rows_are_wanted() -> None:
    model = watched([1, 3], beams=2)
    model.generate(FULL_22)
    assert model.seen[1:] == [None] * 3


def test_threads_are_independent() -> None:
    model, seen = watched([1, 3]), []

    def look(*_: object) -> None:
        other = threading.Thread(target=lambda: seen.append(model.rows.wanted(2)))
        other.start()
        other.join()

    model.register_forward_hook(look)
    model.generate(FULL_22)
    assert seen == [None] * 4
