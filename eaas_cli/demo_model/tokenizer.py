"""The demo models' tokenizer: lossless byte-level BPE, trained on the text below."""

from __future__ import annotations

import re
from typing import Any

__all__ = [
    "BOS_ID",
    "EOS_ID",
    "MIN_VOCAB",
    "PAD_ID",
    "SPECIAL_TOKENS",
    "build_tokenizer",
    "word_ids",
]

SPECIAL_TOKENS = ("<|bos|>", "<|eos|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>")
BOS_ID, EOS_ID, PAD_ID = 0, 1, 2
MIN_VOCAB = len(SPECIAL_TOKENS) + 256
_MIN_WORDS = 64

_CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + eos_token }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

_TEXT = """
The river begins in the hills above the old town, where rain gathers in small stones and slow grass.
By morning it is already wide enough to carry a boat, and the people who live near its banks have
always known what each season brings. In spring the water is cold and quick; in summer children swim
below the bridge; in autumn leaves turn red and gold and drift toward the harbour; in winter a thin
skin of ice forms along the edge before the sun has reached it.

Anna kept a garden behind her house. She planted beans, carrots, onions, garlic, pumpkins and a row
of yellow flowers that nobody could name. Every evening, when her work was done, she walked between
the beds with a watering can and a notebook, writing down which plants had grown and which had not.
Her brother laughed at the notebook, but he asked for advice whenever his own tomatoes failed.

A good workshop has a strong table, a bright lamp, sharp tools and enough room to think. The
carpenter measures twice and cuts once. He chooses oak for doors, pine for shelves, walnut for a
chair that should last a hundred years. When a joint does not fit he begins again, because a mistake
that is hidden today will be found tomorrow by someone else.

Astronomers point their telescopes at the darkest part of the night sky. Light from distant galaxies
travels for millions of years before it touches a mirror no larger than a window. From those few
photons they learn how hot a star burns, how fast it moves, whether planets circle around it, and
sometimes how it will die. Most nights are cloudy, so patience is their most important instrument.

The train to the coast leaves at seven. Passengers carry bread, fruit, newspapers and heavy coats.
Through the window they see farms, factories, forests, a lake like silver paper, then finally the
ocean. An old sailor tells stories about storms, whales and islands without maps; a young doctor
listens, smiling, and misses her station.

Music begins where language ends. First comes rhythm, then melody, then harmony: three simple ideas
from which every song, dance and symphony has been built. A teacher once said that silence is also
part of the music. Play slowly, listen carefully, and leave space between the notes.

Question: what makes bread rise? Answer: yeast eats sugar and breathes out gas. Mix flour, water,
salt and yeast; wait until the dough doubles; shape it gently; bake it in a very hot oven. Number of
loaves: one, two, three, four, five, six, seven, eight, nine, ten. Price: 12 for the first, 8 for
others, 5 on Monday. Please write again soon, and thank you for your kind letter!
"""


def build_tokenizer(vocab: int, max_length: int) -> Any:
    """Build a transformers tokenizer with at most `vocab` tokens, special tokens first."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        min_frequency=1,
        show_progress=False,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    bpe.train_from_iterator([_TEXT.replace("\n", " ")], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=SPECIAL_TOKENS[BOS_ID],
        eos_token=SPECIAL_TOKENS[EOS_ID],
        pad_token=SPECIAL_TOKENS[PAD_ID],
        additional_special_tokens=list(SPECIAL_TOKENS[3:]),
        chat_template=_CHAT_TEMPLATE,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )


def word_ids(tokenizer: Any) -> list[int]:
    """Ids of the tokens that are whole words; in a small vocabulary, of all printable ASCII tokens.

    `fill_weights` draws its cycle from them.
    """
    texts = {i: tokenizer.decode([i]) for i in range(len(SPECIAL_TOKENS), len(tokenizer))}
    vocabulary = {f" {word}" for word in re.findall("[A-Za-z]+", _TEXT)}
    words = [i for i, text in texts.items() if text in vocabulary]
    if len(words) >= _MIN_WORDS:
        return words
    return [i for i, text in texts.items() if text.isascii() and text.isprintable()]
