from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from transformers import GenerationConfig, Qwen3MoeConfig

from eaas.errors import CheckpointError
from eaas.generation.sampling import Sampling
from frontend.defaults import Defaults, ModelFiles

CONFIG = Qwen3MoeConfig(vocab_size=100)


def defaults(end: int | None = 7, **fields: Any) -> Defaults:
    config = GenerationConfig()
    config.update(**fields)
    return Defaults.of(ModelFiles(SimpleNamespace(eos_token_id=end), CONFIG, config))


def test_an_empty_file_decides_nothing() -> None:
    assert defaults() == Defaults(Sampling(), None, (7,), ())
    assert defaults(None) == Defaults(Sampling(), None, (), ())


@pytest.mark.parametrize(
    ("fields", "sampling"),
    [
        ({"do_sample": True}, Sampling(temperature=1.0)),
        ({"do_sample": True, "temperature": 0.0}, Sampling()),
        ({"temperature": 0.6}, Sampling()),
        # As in vLLM, the others hold for a request that names a temperature, too.
        ({"do_sample": False, "top_p": 0.9, "top_k": 5}, Sampling(top_p=0.9, top_k=5)),
        ({"top_k": -1, "min_p": 0.05}, Sampling(min_p=0.05)),
        ({"repetition_penalty": 1.05}, Sampling(repetition_penalty=1.05)),
        ({"do_sample": True, "temperature": 1e30, "top_k": 20}, Sampling(1e30, 1.0, 20)),
    ],
)
def test_sampling(fields: dict[str, Any], sampling: Sampling) -> None:
    assert defaults(**fields).sampling == sampling


@pytest.mark.parametrize(
    ("named", "end", "ends"),
    [
        (None, 7, (7,)),
        (2, 7, (2, 7)),
        ([2, 7, 5], 7, (2, 7, 5)),
        ([2, 100, -1], None, (2,)),  # beyond the vocabulary
        ([], 3, (3,)),
        (0, 0, (0,)),
    ],
)
def test_end_tokens_are_those_of_both_files(
    named: Any, end: int | None, ends: tuple[int, ...]
) -> None:
    assert defaults(end, eos_token_id=named).end_tokens == ends


def test_length() -> None:
    assert defaults(max_new_tokens=2048).max_tokens == 2048


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("repetition_penalty", 1e-50),
        ("repetition_penalty", 1e39),
        ("repetition_penalty", 0),
        ("temperature", 1e39),
        ("temperature", -1.0),
        ("temperature", float("nan")),
        ("temperature", "0.6"),
        ("top_p", 0.0),
        ("top_p", 1e-50),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("top_k", 2**31),
        ("top_k", 1.5),
        ("max_new_tokens", 2.5),
        ("do_sample", "no"),
        ("eos_token_id", ["2"]),
    ],
)
def test_a_value_that_no_request_may_have_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=rf"^generation_config\.json: {field} .+") as caught:
        defaults(**{field: value})
    assert "\n" not in str(caught.value)


def test_the_file_that_names_a_wrong_end_token_is_named() -> None:
    config = GenerationConfig.from_model_config(Qwen3MoeConfig(vocab_size=100, eos_token_id=[5]))
    config.eos_token_id = "5"
    with pytest.raises(CheckpointError, match=r"^config\.json: eos_token_id"):
        Defaults.of(ModelFiles(SimpleNamespace(eos_token_id=None), CONFIG, config))


@pytest.mark.parametrize(
    ("field", "neutral", "set_to"),
    [
        ("suppress_tokens", [], [3]),
        ("bad_words_ids", None, [[3]]),
        ("no_repeat_ngram_size", 0, 3),
        ("stop_strings", [], ["x"]),
        ("num_beams", 1, 4),
        ("forced_bos_token_id", None, 0),
        ("typical_p", 1.0, 0.9),
        ("guidance_scale", 1, 1.5),
        ("sequence_bias", {}, {(3,): 1.0}),
        ("min_new_tokens", 0, 4),
        ("watermarking_config", None, {"bias": 2.0}),
    ],
)
def test_fields_without_effect_are_named_unless_they_are_neutral(
    field: str, neutral: Any, set_to: Any
) -> None:
    assert defaults(**{field: neutral}).ignored == ()
    assert defaults(**{field: set_to}).ignored == (field,)


def test_a_field_of_another_program_is_no_concern() -> None:
    assert defaults(chat_format="chatml", max_window_size=24000).ignored == ()
