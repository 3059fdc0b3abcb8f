"""Compare the routing of domains, and the value of one domain's placement for another.

    python examples/compare_domains.py [DIRECTORY]

Reads one recorded trace for each domain (`examples/traces` by default).
"""

import sys
from pathlib import Path

import numpy as np

from balancer.policies import plan
from simulator.routing import total_variation
from simulator.traces import Trace
from simulator.traces.readers import read_trace

DOMAINS = ("code", "prose", "german", "manual")
SERVERS = 8
TRACES = Path(__file__).with_name("traces")


def main(directory: Path = TRACES) -> tuple[np.ndarray, np.ndarray]:
    """Print and return two (D, D) tables, means over layers.

    Distances: total variation of two domains' loads; on the diagonal, of the even and odd iterations of
    one. PAR: of a plan for the row's load under the column's load.
    """
    traces = [read_trace(directory / f"{domain}.npz") for domain in DOMAINS]
    loads = [trace.counts_ILE.sum(axis=0, dtype=np.float64) for trace in traces]
    distance_DD = np.array([[total_variation(a, b).mean() for b in loads] for a in loads])
    np.fill_diagonal(distance_DD, [noise(trace) for trace in traces])
    par_DD = np.array([[par(a, b) for b in loads] for a in loads])
    show("total variation (diagonal: even and odd iterations)", distance_DD)
    show(f"PAR of a plan for the row's load, {SERVERS} servers", par_DD)
    return distance_DD, par_DD


def noise(trace: Trace) -> float:
    """Distance of two halves of one domain: the noise of the table."""
    even, odd = (trace.counts_ILE[i::2].sum(axis=0, dtype=np.float64) for i in (0, 1))
    return float(total_variation(even, odd).mean())


def par(planned_LE: np.ndarray, served_LE: np.ndarray) -> float:
    """Peak-to-average ratio of the servers' loads, with one redundant expert for each server."""
    made = plan("fractional", planned_LE, SERVERS, planned_LE.shape[1] + SERVERS)
    load_LS = np.einsum("lse,le->ls", made.shares_LSE, served_LE)
    return float((load_LS.max(axis=1) / load_LS.mean(axis=1)).mean())


def show(title: str, table_DD: np.ndarray) -> None:
    """Print a small table."""
    print(f"{title:<52}" + "".join(f"{domain:>8}" for domain in DOMAINS))
    for domain, row in zip(DOMAINS, table_DD, strict=True):
        print(f"{domain:>52}" + "".join(f"{value:8.2f}" for value in row))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
