"""Benchmark of the data plane (client to expert server) against the machine's floor, in one run.

    floor           the bytes of a layer call between two pinned, spinning threads, in C     floor
    layer call      dispatch, slots, a kernel that computes nothing, combine                 rows
    device          the same for tensors on a GPU, with --device cuda                        rows
    server          processor time while idle and while busy                                 parts
    layer           a real layer through a server, against the kernel call in that server    parts

The client's connections and layer calls, and the arena, slot table and loop of an expert server in its own
process, are those of a cluster (`benchmarks.harness`). Monitor, placement and weights are missing. `EAAS_...`
in the environment changes the settings. The floor's threads are pinned to a core each; the others are not.

Compared things take turns of some tenths of a second, round after round. p50 and p99 of a turn cover all of
its calls except a few warm-up calls. A figure is the median over the turns; a difference or a ratio is the
median over the rounds. A slow row has at least 20 calls per turn and three rounds. `calls` counts those of
all `rounds`.

Calls follow one another at once, so a spinning server is awake for the next one. `server.paused_call_us` is a
layer call after a pause of a millisecond.

The document of `python -m benchmarks.dispatch --json` (us: microseconds):

    machine       processor, cores, python, torch, busy_cores_elsewhere, device if there is one
    settings      dtype, top_k, experts, slot_tokens, spin_us, client_slots, rounds, turn_s
    rows          [transport, hidden, tokens, floor_us {p50, p99}, layer_call_us {p50, p99}, over_floor_us,
                  times_floor, device_call_us {p50, p99} (with a device), request_bytes, result_bytes,
                  rounds, calls]
    server        transport, hidden, tokens, idle_cpu_fraction, busy_cpu_fraction (of one core), calls_per_s,
                  paused_call_us {p50, p99}
    layer         [shape, tokens, dtype, transport, kernel, threads, in_process_ms, through_server_ms, ratio,
                  over_ms, calls]; absent without the memory for it
    skipped       [what, reason]

`--no-server` leaves out `server` and `layer`.
"""
