"""The data plane against the machine's own floor, in one run.

What is measured, and where:

    floor           the bytes of an exchange between two pinned processes that spin, in C    _floor.c, floor
    exchange        write, poll, a kernel that computes nothing, reply, read                 caller, server
    layer call      the same with dispatch and combine around it (`LayerCall`, one server)   caller, cell
    client          dispatch and combine alone                                               caller, cell
    server          processor time while idle and while busy; a look at many flags           upkeep, scan
    crowd           the exchange with many clients and servers on this machine               crowd
    policies        layer calls at servers of which one has half the others' speed           policies
    layer           a real layer through a server against the kernel's call in that server   layer

The exchange is that of a cluster: the client's `Connection` over a transport, `Connect` over gRPC, arena,
slot table and loop of an expert server in a process of its own; only monitor, placement and weights are
missing. Settings are a cluster's (`spin_us`), and `EAAS_...` in the environment changes them here, too. The
floor's processes stay on a core each; all others go where the kernel puts them, as in a cluster.

How: whatever is compared is measured in turns of some tenths of a second, one after the other, round after
round. Of each turn p50 and p99 are taken over all of its calls; a figure is the median over the turns, a
difference or a ratio the median over the rounds' own. Each turn begins with a few calls that do not count
(a process that slept meets cold caches); nothing else is left out. A slow cell has as few as 20 calls in a
turn, so that its p99 is close to the longest, and as few as three rounds: `calls` says how many exchanges
there were in all `rounds`.

Calls follow one another at once, so that a server that spins for long enough is awake when the next one
comes. `server.paused_exchange_us` is the same exchange after a pause of a millisecond.

The document of `eaas bench dispatch --json` (us: microseconds):

    machine       processor, cores, python, torch, busy_cores_elsewhere
    settings      dtype, top_k, experts, slot_tokens, server_spin_us, client_spin_us, client_slots, rounds,
                  turn_s
    rows          [transport, hidden, tokens, exchange_us {p50, p99}, floor_us {p50, p99}, over_floor_us,
                  times_floor, layer_call_us {p50, p99}, client_us, request_bytes, result_bytes,
                  rounds, calls]
    scan_us       {"64", "1024"}: Flags.scan over so many slots
    wait_look_us  {"64", "1024"}: Flags.wait that looks once
    server        transport, hidden, tokens, idle_cpu_fraction, busy_cpu_fraction (of one core),
                  exchanges_per_s, paused_exchange_us {p50, p99}
    crowd         clients, servers, transport, hidden, tokens, p50_us, p99_us, ratio (p99 to p50),
                  exchanges_per_s
    policies      transport, hidden, tokens, servers, redundancy, slow_server_speed, skew, work_us,
                  rows [policy, layer_call_us {p50, p99}, times_weights]
    layer         shape, tokens, dtype, transport, kernel, threads, in_process_ms, through_server_ms, ratio,
                  over_ms, calls; absent where there is no memory for it
    skipped       [what, reason]

`scan_us` to `layer` are not there with `--no-server`. `client_us` is the time that a layer call spends
outside the connection: it only computes there, so that this is processor time.

`run.bench_dispatch` is not named here: the processes of a crowd would all import what only the run needs.
"""

from eaas.bench.dispatch.plan import Plan, make_plan

__all__ = ["Plan", "make_plan"]
