"""Benchmark of the data plane (client to expert server) against the machine's floor, in one run.

Measurements and modules:

    floor           the bytes of an exchange between two pinned, spinning processes, in C    _floor.c, floor
    exchange        write, poll, a kernel that computes nothing, reply, read                 caller, server
    layer call      an exchange with dispatch and combine (`LayerCall`, one server)          caller, cell
    device          a layer call for tensors on a GPU, with --device cuda                    on_device
    client          dispatch and combine alone                                               caller, cell
    server          processor time while idle and while busy                                 upkeep
    servers         a layer call to several servers, each of which sleeps as long as one    servers
    layer           a real layer through a server, against the kernel call in that server    layer

The exchange uses a cluster's code: the client's `Connection`, a transport, and the arena, slot table and loop
of an expert server in its own process. Monitor, placement and weights are missing. `EAAS_...` in the
environment changes the settings. The floor's processes are pinned to a core each; the others are not.

Compared things take turns of some tenths of a second, round after round. p50 and p99 of a turn
cover all of its calls except a few warm-up calls. A figure is the median over the turns; a difference or a
ratio is the median over the rounds. A slow cell has at least 20 calls per turn and three rounds; `calls`
counts the exchanges of all `rounds`.

Calls follow one another at once, so a spinning server is awake for the next one.
`server.paused_exchange_us` is an exchange after a pause of a millisecond.

The document of `python -m benchmarks.dispatch --json` (us: microseconds):

    machine       processor, cores, python, torch, busy_cores_elsewhere, device if there is one
    settings      dtype, top_k, experts, slot_tokens, server_spin_us, client_spin_us, client_slots, rounds,
                  turn_s
    rows          [transport, hidden, tokens, exchange_us {p50, p99}, floor_us {p50, p99}, over_floor_us,
                  times_floor, layer_call_us {p50, p99}, device_call_us {p50, p99} (with a device),
                  client_us, request_bytes, result_bytes, rounds, calls]
    server        transport, hidden, tokens, idle_cpu_fraction, busy_cpu_fraction (of one core),
                  exchanges_per_s, paused_exchange_us {p50, p99}
    servers       tokens, servers, sleep_us, one_us, all_us, ratio (one_us / all_us)
    layer         [shape, tokens, dtype, transport, kernel, threads, in_process_ms, through_server_ms, ratio,
                  over_ms, calls]; absent without the memory for it
    skipped       [what, reason]

`--no-server` leaves out `server` to `layer`. `client_us` is the time of a layer call outside the connection,
which is all computation.

`run.bench_dispatch` is not exported, because the servers would import it without need.
"""

from benchmarks.dispatch.plan import Plan, make_plan

__all__ = ["Plan", "make_plan"]
