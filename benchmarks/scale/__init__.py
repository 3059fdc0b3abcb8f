"""Unit costs of a large cluster, measured here, and failures of it, simulated: the figures of docs/scale.md.

    monitor      heartbeats, snapshots, and reports of clients' connections, by a real monitor process
    balancer     the planner at this size, placement policies, placements as messages
    failures     a server, a node, a rack; upgrades: the live planner in simulated time (`cluster`)

The document of `python -m benchmarks.scale --json` (`--only` leaves parts out):

    machine      processor, cores
    settings     the options
    monitor      members, join_s, heartbeat_us, cores, kb_per_member, snapshot {bytes, hold_cpu_ms},
                 reach {bytes, push_us}; quiet, storm (watchers that reconnect for snapshots), watched:
                 what `monitor` measures in each
    balancer     planner {first_s, loss_s, longest_s}, placement {bytes, record_limit, take_ms},
                 policies [{policy, plan_ms, nodes_ms}]
    failures, upgrade
                 [{what, servers, uncovered, covered_s, single, whole_s, imbalance_before, imbalance, loads}]
"""
