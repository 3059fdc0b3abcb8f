"""The shipped demo model: its size, and continuations of the prompt's domain."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from demo_training.sources import DOMAINS
from eaas.checkpoint import quiet_transformers

EXAMPLES = Path(__file__).parents[3] / "examples"
MODEL = EXAMPLES / "demo"
# Written for this test: (beginning, continuation); no model was trained on them.
TEXTS = {
    "code": (
        "class Counter:\n    def __init__(self, start=0):\n        self.value = start\n\n",
        "    def increment(self):\n        self.value += 1\n        return self.value\n",
    ),
    "prose": (
        "And the king sent messengers to his brother, and said to him, Behold, the men of the north "
        "have come against us with many horses,",
        " and all the people are afraid. Therefore come, you and your sons, and stand with me.",
    ),
    "german": (
        "Diese Option legt fest, wie viele Zeilen das Programm ausgibt. Falls keine Zahl angegeben "
        "wird, werden alle Zeilen ausgegeben.",
        " Die Datei muss vorhanden sein und der Benutzer muss sie lesen können.",
    ),
    "manual": (
        "RETURN VALUE\n       On success, the number of entries is returned. On error, -1 is returned, "
        "and\n       errno is set to indicate the error.\n\nERRORS\n       EINVAL The size",
        " is not a multiple of the page size.\n\n       ENOMEM Insufficient memory is available.\n",
    ),
}


@pytest.fixture(scope="module")
def loaded() -> Iterator[tuple[Any, Any]]:
    """Load in float32, so that every CPU samples the same tokens."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with quiet_transformers():
        model = AutoModelForCausalLM.from_pretrained(
            MODEL, dtype=torch.float32, local_files_only=True, experts_implementation="eager"
        )
        yield model.eval(), AutoTokenizer.from_pretrained(MODEL, local_files_only=True)
    torch.set_num_threads(before)


def test_sizes(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    config = model.config
    assert (config.num_hidden_layers, config.num_experts, config.num_experts_per_tok) == (8, 32, 4)
    assert 10e6 < sum(p.numel() for p in model.parameters()) < 20e6
    assert sum(file.stat().st_size for file in MODEL.iterdir()) < 36e6
    assert len(tokenizer) == config.vocab_size == 4096


@torch.no_grad()
def loss(model: Any, tokenizer: Any, before: str, after: str) -> float:
    """Nats per token of `after`."""
    start, ids = tokenizer(before)["input_ids"], tokenizer(after)["input_ids"]
    logits = model(torch.tensor([start + ids])).logits[0, len(start) - 1 : -1]
    return float(torch.nn.functional.cross_entropy(logits, torch.tensor(ids)))


@pytest.mark.parametrize("domain", DOMAINS)
def test_a_text_goes_on_as_its_domain(loaded: tuple[Any, Any], domain: str) -> None:
    """A continuation is likelier after its own beginning than after another domain's."""
    after = TEXTS[domain][1]
    losses = {other: loss(*loaded, TEXTS[other][0], after) for other in DOMAINS}
    own = losses.pop(domain)
    # Knowing nothing is ln 4096 = 8.3 nats.
    assert own < 5.5
    assert own < min(losses.values()) - 0.1, (own, losses)
