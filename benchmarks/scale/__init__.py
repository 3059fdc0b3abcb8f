"""Unit costs of a large cluster, measured here, and failures of it, simulated: the figures of docs/scale.md.

    monitor      heartbeats, snapshots, and reports of clients' connections, by a real monitor process
    balancer     the planner at this size, placement policies, placements as messages
    connections  memory, threads and descriptors of connections, by a real server process; the slots' memory
    failures     a server, a node, a rack; upgrades: `simulator.failures`

The document of `python -m benchmarks.scale --json`:

    machine      processor, cores
    settings     SIZES
    monitor      members, heartbeat_us, kb_per_member, snapshot {bytes, hold_cpu_ms}, reach {bytes, push_us}
    balancer     planner {first_s, loss_s, longest_s}, placement {bytes, record_limit, take_ms},
                 policies [{policy, plan_ms, nodes_ms}]
    connections  {server, client} {kb, threads, files}, slots [{tokens, mb}]
    failures     [{what, servers, uncovered, covered_s, single, whole_s, imbalance, loads}]
"""

from benchmarks.scale.run import bench_scale

__all__ = ["bench_scale"]
