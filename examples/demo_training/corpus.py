"""The text as tokens: one tokenizer for all domains, and held-out text."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from .sources import DOMAINS, SOURCES, read_source

__all__ = ["CONTEXT", "END", "Corpus", "build_corpus"]

CONTEXT = 4096
END = "<|end|>"
_HELD_OUT = 50  # one part in this many
_PART_BYTES = 8_000
# The model continues a message: it has seen texts, no conversations. With tools the prompt is ChatML, so that
# programs that use tools can be tried.
_CHATML = files("eaas_cli.demo_model") / "templates" / "chatml.jinja"
_CHAT_TEMPLATE = (
    "{%- if tools %}\n"
    + _CHATML.read_text("utf-8")
    + "{%- else %}\n{{- messages | map(attribute='content') | select | join('\n') }}\n{%- endif %}"
)


@dataclass(frozen=True)
class Corpus:
    """Tokens by domain: `train[domain]` and `held_out[domain]`, both uint16 (N,)."""

    train: dict[str, np.ndarray]
    held_out: dict[str, np.ndarray]
    bytes_read: dict[str, int]


def build_corpus(cache: Path, vocab: int, seed: int) -> tuple[Any, Corpus]:
    """The tokenizer and the tokens, from the cache if possible.

    Every part of 8 kB is held out or not by a hash of its name, so always the same ones are.

    Raises:
        SourceError: A source cannot be had.
    """
    from transformers import AutoTokenizer

    directory = cache / f"tokens-{vocab}-{seed}"
    if not (directory / "bytes.json").is_file():
        _build(directory, cache, vocab, seed)
    splits = {
        split: {d: np.load(directory / f"{split}-{d}.npy", mmap_mode="r") for d in DOMAINS}
        for split in ("train", "held_out")
    }
    read = json.loads((directory / "bytes.json").read_text())
    return AutoTokenizer.from_pretrained(directory), Corpus(**splits, bytes_read=read)


def _build(directory: Path, cache: Path, vocab: int, seed: int) -> None:
    texts: dict[str, list[tuple[str, str]]] = {domain: [] for domain in DOMAINS}
    for source in SOURCES:
        for name, text in read_source(source, cache):
            texts[source.domain] += _parts(name, text)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = _train_tokenizer(texts, vocab, seed)
    tokenizer.save_pretrained(directory, save_jinja_files=False)
    end = tokenizer.convert_tokens_to_ids(END)
    for domain, parts in texts.items():
        for split in ("train", "held_out"):
            chosen = [t for name, t in parts if _is_held_out(name) == (split == "held_out")]
            np.save(directory / f"{split}-{domain}.npy", _encode(tokenizer, chosen, end))
    read = {d: sum(len(t.encode()) for _, t in parts) for d, parts in texts.items()}
    (directory / "bytes.json").write_text(json.dumps(read))


def _parts(name: str, text: str) -> Iterator[tuple[str, str]]:
    """Pieces of about 8 kB, cut at line ends."""
    lines: list[str] = []
    size = number = 0
    for line in text.splitlines(keepends=True):
        lines.append(line)
        size += len(line)
        if size >= _PART_BYTES:
            yield f"{name}#{number}", "".join(lines)
            lines, size, number = [], 0, number + 1
    if lines:
        yield f"{name}#{number}", "".join(lines)


def _is_held_out(name: str) -> bool:
    return zlib.crc32(name.encode()) % _HELD_OUT == 0


def _train_tokenizer(texts: dict[str, list[tuple[str, str]]], vocab: int, seed: int) -> Any:
    """Byte-level BPE on the same amount of text (4 MB at most) of each domain."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    rng = np.random.default_rng(seed)
    sample: list[str] = []
    for parts in texts.values():
        kept = [text for name, text in parts if not _is_held_out(name)]
        sample += [kept[i] for i in rng.permutation(len(kept))[:500]]
    bpe = Tokenizer(models.BPE())
    # A run of spaces (indentation) is a word; its last space belongs to the next word. Each digit is a
    # word.
    words = Regex(r"\n+ *(?= )|\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?=\S)|\s+")
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(words, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        show_progress=False,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    bpe.train_from_iterator(sample, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=END,
        pad_token=END,
        chat_template=_CHAT_TEMPLATE,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def _encode(tokenizer: Any, texts: list[str], end: int) -> np.ndarray:
    """All texts, each with the end token after it."""
    encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return np.concatenate([np.array([*ids, end], np.uint16) for ids in encoded])
