"""Cut `turns.npz` into one trace for each domain: each batch of its prompts has one domain."""

from pathlib import Path

from simulator.traces import Trace, write_trace
from simulator.traces.readers import read_trace

HERE = Path(__file__).parent
# The order of `cat prompts/*.txt`.
DOMAINS = ("code", "german", "manual", "prose")


def main() -> None:
    """Write four files into this directory."""
    turns = read_trace(HERE / "turns.npz")
    passes = turns.iterations // len(DOMAINS)
    for i, domain in enumerate(DOMAINS):
        part = turns.counts_ILE[i * passes : (i + 1) * passes]
        notes = {**turns.notes, "prompts": turns.notes["batch"], "domain": domain}
        write_trace(Trace(part, notes), HERE / f"{domain}.npz")


if __name__ == "__main__":
    main()
