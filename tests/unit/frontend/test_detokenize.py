import pytest
from hypothesis import given
from hypothesis import strategies as st

from byte_tokenizer import byte_tokenizer
from frontend.requests.text import Detokenizer

# The worst case: every character beyond ASCII takes several tokens.
TOKENIZER = byte_tokenizer("</s>", eos_token="</s>")


@given(st.lists(st.integers(0, 256), max_size=40))
def test_pieces_add_up_to_the_whole_text(tokens: list[int]) -> None:
    detokenizer = Detokenizer(TOKENIZER, skip_special_tokens=True)
    text = "".join(detokenizer.push(token) for token in tokens) + detokenizer.flush()
    assert text == TOKENIZER.decode(tokens, skip_special_tokens=True)


@given(st.text())
def test_no_incomplete_character_is_shown(text: str) -> None:
    detokenizer = Detokenizer(TOKENIZER, skip_special_tokens=True)
    shown = ""
    for token in TOKENIZER(text)["input_ids"]:
        shown += detokenizer.push(token)
        assert text.startswith(shown)
    # Only a literal U+FFFD may still be held back.
    assert text.rstrip("\ufffd").startswith(shown) or shown == text
    assert shown + detokenizer.flush() == text


@pytest.mark.parametrize(("skip", "text"), [(True, "ab"), (False, "a</s>b")])
def test_special_tokens(skip: bool, text: str) -> None:
    tokens = [*TOKENIZER("a")["input_ids"], 256, *TOKENIZER("b")["input_ids"]]
    detokenizer = Detokenizer(TOKENIZER, skip_special_tokens=skip)
    assert "".join(map(detokenizer.push, tokens)) == text
