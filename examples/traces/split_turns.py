"""Cuts `turns.npz` into a trace for each domain: its prompts came in batches of one domain each."""

from pathlib import Path

from eaas.trace import Trace, write_trace
from eaas.trace.readers import read_trace

HERE = Path(__file__).parent
# The order of `cat prompts/*.txt`.
DOMAINS = ("code", "german", "manual", "prose")


def main() -> None:
    """Writes four files beside this one."""
    turns = read_trace(HERE / "turns.npz")
    passes = turns.iterations // len(DOMAINS)
    for i, domain in enumerate(DOMAINS):
        part = turns.counts_ILE[i * passes : (i + 1) * passes]
        notes = {**turns.notes, "prompts": turns.notes["batch"], "domain": domain}
        write_trace(Trace(part, notes), HERE / f"{domain}.npz")


if __name__ == "__main__":
    main()
