from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from attention_client.serve.detokenize import Detokenizer


def byte_tokenizer() -> Any:
    """Every byte is a token, as the worst model could produce them; 256 is special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)} | {"</s>": 256}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


TOKENIZER = byte_tokenizer()


@given(st.lists(st.integers(0, 256), max_size=40))
def test_pieces_are_the_whole_for_any_tokens(tokens: list[int]) -> None:
    detokenizer = Detokenizer(TOKENIZER, skip_special_tokens=True)
    text = "".join(detokenizer.push(token) for token in tokens) + detokenizer.flush()
    assert text == TOKENIZER.decode(tokens, skip_special_tokens=True)


@given(st.text())
def test_no_half_character_is_shown(text: str) -> None:
    detokenizer = Detokenizer(TOKENIZER, skip_special_tokens=True)
    shown = ""
    for token in TOKENIZER(text)["input_ids"]:
        shown += detokenizer.push(token)
        assert text.startswith(shown)
    # Only a literal U+FFFD is still held back.
    assert text.rstrip("\ufffd").startswith(shown) or shown == text
    assert shown + detokenizer.flush() == text


@pytest.mark.parametrize(("skip", "text"), [(True, "ab"), (False, "a</s>b")])
def test_special_tokens(skip: bool, text: str) -> None:
    tokens = [*TOKENIZER("a")["input_ids"], 256, *TOKENIZER("b")["input_ids"]]
    detokenizer = Detokenizer(TOKENIZER, skip_special_tokens=skip)
    assert "".join(map(detokenizer.push, tokens)) == text
