"""The demo models' tokenizer: lossless byte-level BPE, trained on `text.txt`.

Its added tokens and its chat template are those of the architecture's family of models, so that clients use
tools with a demo model as with a published one.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

__all__ = [
    "BOS_ID",
    "EOS_ID",
    "MIN_VOCAB",
    "PAD_ID",
    "build_tokenizer",
    "end_ids",
    "weak_ids",
    "word_ids",
]

BOS_ID, EOS_ID, PAD_ID = 0, 1, 2
_BYTES = 256
MIN_VOCAB = 6 + _BYTES
_MIN_WORDS = 64


@dataclass(frozen=True)
class _Family:
    """Chat template and added tokens of a family of models.

    Attributes:
        template: File in the folder `templates`.
        special: Begin and end of a text, padding, and the other special tokens.
        markup: Tokens that belong to an answer's text.
        ends: Special tokens that end an answer, too.
    """

    template: str
    special: tuple[str, ...]
    markup: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()


def _names(*lines: str) -> tuple[str, ...]:
    return tuple(" ".join(lines).split())


_QWEN = _Family(
    "chatml.jinja",
    _names("<|bos|> <|im_end|> <|endoftext|> <|im_start|>"),
    _names("<tool_call> </tool_call> <think> </think> <tool_response> </tool_response>"),
)
_FAMILIES = {
    "qwen3_moe": _QWEN,
    "qwen2_moe": _QWEN,
    "mixtral": _Family(
        "mistral.jinja",
        _names(
            "<s> </s> <pad> [INST] [/INST] [TOOL_CALLS] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS]",
            "[TOOL_RESULTS] [/TOOL_RESULTS] [SYSTEM_PROMPT] [/SYSTEM_PROMPT]",
        ),
    ),
    "olmoe": _Family(
        "olmo.jinja",
        _names("<|bos|> <|im_end|> <|pad|> <|im_start|>"),
        _names("<function_calls> </function_calls> <functions> </functions>"),
    ),
    "deepseek_v3": _Family(
        "deepseek.jinja",
        _names("<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> <｜▁pad▁｜>"),
        _names(
            "<｜User｜> <｜Assistant｜> <think> </think> <｜tool▁calls▁begin｜> <｜tool▁calls▁end｜>",
            "<｜tool▁call▁begin｜> <｜tool▁sep｜> <｜tool▁call▁end｜>",
            "<｜tool▁output▁begin｜> <｜tool▁output▁end｜>",
        ),
    ),
    "gpt_oss": _Family(
        "harmony.jinja",
        _names(
            "<|start|> <|return|> <|endoftext|> <|channel|> <|message|> <|end|> <|call|>",
            "<|constrain|>",
        ),
        ends=("<|call|>",),
    ),
}

_TEXT = (files(__package__) / "text.txt").read_text("utf-8")


def build_tokenizer(vocab: int, max_length: int, arch: str = "qwen3_moe") -> Any:
    """Build a transformers tokenizer with at most `vocab` tokens, added tokens first.

    A vocabulary that is too small for all added tokens of the architecture's family has the first of them.

    Args:
        vocab: `MIN_VOCAB` or more.
        max_length: Tokens of the longest text.
        arch: The architecture, by transformers' name.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    family = _FAMILIES[arch]
    added = (*family.special, *family.markup)[: vocab - _BYTES]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        min_frequency=1,
        show_progress=False,
        special_tokens=list(added),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    bpe.train_from_iterator([_TEXT.replace("\n", " ")], trainer)
    document = json.loads(bpe.to_str())
    for token in document["added_tokens"]:
        token["special"] = token["content"] in family.special
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(document)),
        bos_token=added[BOS_ID],
        eos_token=added[EOS_ID],
        pad_token=added[PAD_ID],
        additional_special_tokens=[each for each in added[3:] if each in family.special],
        chat_template=(files(__package__) / "templates" / family.template).read_text("utf-8"),
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )


def end_ids(tokenizer: Any, arch: str) -> int | list[int]:
    """Ids of the tokens that end an answer, as generation_config.json has them."""
    ids = tokenizer.get_added_vocab()
    further = [ids[name] for name in _FAMILIES[arch].ends if name in ids]
    return [EOS_ID, *further] if further else EOS_ID


def weak_ids(tokenizer: Any) -> list[int]:
    """Ids of the added tokens and of the tokens that frame each message in the chat template."""
    message = [{"role": "user", "content": ""}]
    frame = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    return sorted({*tokenizer.added_tokens_decoder, *tokenizer.encode(frame)})


def word_ids(tokenizer: Any) -> list[int]:
    """Ids of the tokens that are whole words; in a small vocabulary, of all printable ASCII tokens.

    `fill_weights` draws its cycle from them.
    """
    plain = sorted({*range(len(tokenizer))} - tokenizer.added_tokens_decoder.keys())
    texts = {i: tokenizer.decode([i]) for i in plain}
    vocabulary = {f" {word}" for word in re.findall("[A-Za-z]+", _TEXT)}
    words = [i for i, text in texts.items() if text in vocabulary]
    if len(words) >= _MIN_WORDS:
        return words
    return [i for i, text in texts.items() if text.isascii() and text.isprintable()]
