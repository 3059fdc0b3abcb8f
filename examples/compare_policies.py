"""Make a changing load, plan for it, and replay three policies over it. Takes some seconds.

    python examples/compare_policies.py

`eaas trace compare` does the last part with any trace.
"""

from balancer.policies import plan
from simulator import Comparison, compare
from simulator.traces import Trace, generate_trace

SERVERS = 16
POLICIES = ("eplb", "scalpel", "fractional+split")


def main() -> Comparison:
    """Print one plan's balance and one row for each policy; returns the comparison."""
    trace: Trace = generate_trace("drift", iterations=1500, layers=6, experts=64, tokens=512)
    slots = trace.experts + SERVERS

    # One plan, for the load of the first 200 iterations.
    made = plan("fractional", trace.counts_ILE[:200].sum(axis=0), SERVERS, slots)
    print(f"planned PAR {made.par_L.mean():.4f}, no plan is below {made.bound_L.mean():.4f}")

    # Many plans, and their balance on the batches after them.
    comparison = compare(trace, POLICIES, servers=[SERVERS], intervals=[200])
    for run in comparison.replays:
        print(
            f"{run.policy:>18}: PAR {run.par_mean:.3f}, {run.transit:4} replicas loaded, "
            f"score {comparison.score(run):.1f}"
        )
    return comparison


if __name__ == "__main__":
    main()
