"""Count the experts that gpt-oss-20b chose, as published in GPT-OSS-MoE-ExpertFingerprinting, as two traces.

    git clone https://github.com/AmanPriyanshu/GPT-OSS-MoE-ExpertFingerprinting
    python examples/traces/gpt-oss-20b/make_traces.py GPT-OSS-MoE-ExpertFingerprinting [DIRECTORY]

Writes `domains.npz` and `mixed.npz`, by default beside this file. They hold counts, and no text.
"""

import json
import sys
from collections import Counter
from pathlib import Path

import numpy as np

from simulator.routing import count_token_ids
from simulator.traces import Trace, write_trace
from simulator.traces.trace import checked_counts

HERE = Path(__file__).parent
LAYERS, EXPERTS, BATCH = 24, 32, 64
# Their prompts may be had only under an agreement of their own.
LEFT_OUT = "sorry_bench_base"
# The first domain with a word of a "dataset/subject" in lower case has it.
DOMAINS = {
    "science": ("gpqa", "physics", "chemistry", "biology", "astronomy"),
    "mathematics": ("math", "algebra", "statistics", "formal_logic"),
    "computing": ("comput", "machine_learning", "engineering"),
    "health": (
        *("health", "medic", "anatomy", "clinical", "nutrition"),
        *("virology", "aging", "sexuality"),
    ),
    "law": ("law", "jurisprudence", "politics", "policy", "security_studies"),
    "humanities": ("history", "philosophy", "religions", "moral", "fallacies"),
    "society": (
        *("econom", "business", "psychology", "sociology", "geography"),
        *("management", "marketing", "accounting", "public_relations"),
    ),
    "other": ("",),
}


def main(clone: Path, directory: Path = HERE) -> None:
    """Write the two traces, and print the tokens of each domain."""
    answers = read_answers(clone / "data")
    tokens = Counter[str]()
    for domain, ids_NLK in answers:
        tokens[domain] += len(ids_NLK)
    print(f"{len(answers)} answers, {tokens.total():,} tokens: {dict(tokens)}")
    in_turn = [ids for domain in DOMAINS for name, ids in answers if name == domain]
    order = np.random.default_rng(0).permutation(len(answers))
    for name, queue in (("domains", in_turn), ("mixed", [in_turn[i] for i in order])):
        notes = {
            "source": "github.com/AmanPriyanshu/GPT-OSS-MoE-ExpertFingerprinting, Apache-2.0",
            "model": "openai/gpt-oss-20b",
            "batch": BATCH,
            "order": "one domain after another" if name == "domains" else "random",
        }
        if name == "domains":
            notes["domains"] = {domain: tokens[domain] for domain in DOMAINS}
        counts_ILE = count_token_ids(batched(queue), EXPERTS, BATCH)
        write_trace(Trace(checked_counts(counts_ILE, name), notes), directory / f"{name}.npz")


def read_answers(data: Path) -> list[tuple[str, np.ndarray]]:
    """The domain of each answer, and the experts of its tokens, (N, L, K), in the order of the paths."""
    answers: list[tuple[str, np.ndarray]] = []
    seen: set[bytes] = set()
    for path in sorted(data.glob("*/*/*_examples.json")):
        subject = path.parent.relative_to(data).as_posix().lower()
        if subject.startswith(LEFT_OUT):
            continue
        ids_NLK = np.array(
            [
                [layers[f"layer_{layer}"]["selected_experts"] for layer in range(LAYERS)]
                for token in json.loads(path.read_bytes())["router_data"]
                for layers in token.values()
            ],
            np.uint8,
        )
        # One answer is in two files.
        if ids_NLK.tobytes() not in seen:
            seen.add(ids_NLK.tobytes())
            answers.append((domain_of(subject), ids_NLK))
    return answers


def domain_of(subject: str) -> str:
    """Name the first domain with a word that the subject has."""
    return next(name for name, words in DOMAINS.items() if any(word in subject for word in words))


def batched(queue: list[np.ndarray]) -> np.ndarray:
    """The tokens, (T, L, K), in the order in which continuous batching decodes them.

    Each step decodes one token of each of BATCH answers; where one has ended, the next of the queue begins.
    """
    waiting = iter(queue)
    running: list[tuple[np.ndarray, int]] = []
    steps: list[np.ndarray] = []
    while True:
        while len(running) < BATCH and (answer := next(waiting, None)) is not None:
            running.append((answer, 0))
        if not running:
            return np.concatenate(steps)
        steps.append(np.stack([answer[at] for answer, at in running]))
        running = [(answer, at + 1) for answer, at in running if at + 1 < len(answer)]


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:3]))
