"""Write the result: a transformers checkpoint and its model card."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from .corpus import CONTEXT, Corpus
from .evaluate import SAMPLE_PROMPTS, evaluate, sample
from .sources import DOMAINS, SOURCES
from .training import Progress, Settings

__all__ = ["write_result"]


def write_result(
    model: Any,
    tokenizer: Any,
    corpus: Corpus,
    settings: Settings,
    progress: Progress,
    target: Path,
) -> None:
    """Write the checkpoint, evaluate it as transformers loads it, write the card."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    device = next(model.parameters()).device
    new = target.with_name(f".{target.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=0.7,
        top_k=40,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
    )
    model.to(torch.bfloat16).save_pretrained(new)
    (new / "model.safetensors").chmod(0o644)
    tokenizer.model_max_length = CONTEXT
    tokenizer.save_pretrained(new, save_jinja_files=False)
    trained = AutoModelForCausalLM.from_pretrained(new, dtype=torch.bfloat16).to(device).eval()
    found = evaluate(trained, tokenizer, corpus)
    samples = {d: sample(trained, tokenizer, p) for d, p in SAMPLE_PROMPTS.items()}
    card = _card(trained, corpus, settings, progress, found, samples)
    (new / "README.md").write_text(card)
    shutil.rmtree(target, ignore_errors=True)
    new.rename(target)


def _card(
    model: Any,
    corpus: Corpus,
    settings: Settings,
    progress: Progress,
    found: dict[str, tuple[float, float]],
    samples: dict[str, str],
) -> str:
    config = model.config
    count = sum(p.numel() for p in model.parameters())
    seen = progress.tokens / sum(len(ids) for ids in corpus.train.values())
    lines = [
        "# The demo model",
        "",
        f"A Mixture-of-Experts model of {count / 1e6:.1f} million parameters that writes in the manner "
        "of its prompt: Python, biblical English, German documentation, English manual pages. It "
        "exists to be served: it knows nothing, and its statements are not true.",
        "",
        f"transformers' `Qwen3MoeForCausalLM`: {config.num_hidden_layers} layers, hidden size "
        f"{config.hidden_size}, {config.num_experts} experts of width {config.moe_intermediate_size} in "
        f"each, top-{config.num_experts_per_tok}, vocabulary {config.vocab_size} (byte-level BPE trained "
        "on the same text), bf16. It continues texts; a chat message is continued as well. End a prompt in "
        "the middle of a line: a line end is a token of its own only before a line without indent, or at "
        "the end of a text.",
        "",
        "## Data",
        "",
        "| Domain | Text | Licence |",
        "|---|---|---|",
        *(f"| {s.domain} | {_name(s.name)} | {s.licence} |" for s in SOURCES),
        "",
        "The packages are Debian's. One piece in 50 (of 8 kB each) was held out.",
        "",
        "## Training",
        "",
        f"`examples/train_demo.py`, seed {settings.seed}: {progress.step} steps, "
        f"{progress.tokens / 1e6:.2f} million tokens ({seen:.2f} of the text; the domains in equal "
        f"parts), {progress.worked_s / 60:.0f} minutes on a {model.device.type.upper()}: "
        f"{progress.tokens / progress.worked_s:.0f} tokens/s. Sequences of {settings.length} tokens, of "
        f"{settings.long_length} at the end. Loss of the last batches {progress.loss:.2f}.",
        "",
        "## Held-out text",
        "",
        "| | " + " | ".join(DOMAINS) + " |",
        "|---|" + "---|" * len(DOMAINS),
        "| loss, nats a token | " + " | ".join(f"{found[d][0]:.2f}" for d in DOMAINS) + " |",
        "| bits a byte | " + " | ".join(f"{found[d][1]:.2f}" for d in DOMAINS) + " |",
        "",
        "## Samples",
        "",
        "Prompt ▸ continuation (temperature 0.7, top-k 40, the first try):",
    ]
    for domain, text in samples.items():
        whole = f"{SAMPLE_PROMPTS[domain]} ▸{text}"
        lines += ["", f"### {domain}", "", "```", *whole.splitlines(), "```"]
    lines += [
        "",
        "## Licence",
        "",
        "The weights and this card: Apache 2.0, like the repository, to the extent that we can license "
        "them. They hold statistics of the texts above, not the texts; if you regard them as a derived "
        "work, the table has the texts' licences. Samples may repeat short pieces.",
    ]
    return "\n".join(lines) + "\n"


def _name(source: str) -> str:
    return "Python's standard library" if source == "python" else f"`{source}`"
