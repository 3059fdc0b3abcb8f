"""Benchmark of a monitor process with growing numbers of simulated members.

Measurements and modules:

    heartbeats   processor time, memory and answers of the monitor, without watchers         stage
    snapshots    the same while watchers fetch snapshots                                     snapshot_process
    watching     the same with watchers, and the time until they learn of an end             stage, run

On the wire a simulated member acts like `MemberSession`: Register, a Heartbeat stream with a message per
second (sent once the last was answered), and a Watch stream. It describes itself as a server or a client of a
model with 48 layers. A few processes hold thousands of members and make HTTP/2 frames by hand (`http2`),
because gRPC's client would cost more than the monitor. By default each member has its own connection.

The monitor runs with a clock at its event loop (`monitor_process`): no member is heard while one step of
the loop runs. In `snapshots`, watchers connect at the same time, and each reconnects as soon as it has its
snapshot.

In `watching`, watchers begin at the present, as after a reconnect. The last member
ends, silently (`death`: its streams break and its lease expires) or with a `goodbye`. `first` and `last` are
the times from the end until the first and the last watcher get DEAD; `spread` is their difference. Each is
the worst of `deaths`.

The document of `python -m benchmarks.monitor --json`:

    machine      processor, cores, python, grpc, busy_cores (of the machine, on average)
    settings     interval_s, lease_s, per_connection, loaders, seconds, deaths
    rows         [members, join_s, heartbeats {FIGURES}, snapshot {bytes, ms},
                  snapshots {FIGURES, watchers, snapshots, megabytes, fetch_ms {p50, p99, max},
                             refused (streams that the monitor ended)},
                  watching [watchers, FIGURES, goodbye_ms {ENDS}, death_ms {ENDS}]]
                 or [members, watching [], error]: they could not join; the run ends
    FIGURES      cpu_cores (of the monitor), cpu_us_per_heartbeat, rss_mb, heartbeats_per_s, late (turns
                 before the last answer), taken (share of answered turns),
                 ended (streams that the monitor ended: leases lapsed), hold_ms (longest step of the loop),
                 hold_cpu_ms (in processor time), lag_ms (longest delay of a timer),
                 answer_ms {p50, p99, max}, watched_per_s (messages to
                 all watchers), signs_per_s (those without a change), out_of_turn
    ENDS         first, last, spread, not_told (watchers without the event after 30 s)

A step ends when the monitor ends a member's stream: the member does not register again. It also ends if
watchers miss an end. Members' processes share the machine; `cpu_cores` is that of the monitor alone.
"""

from benchmarks.monitor.plan import Plan, make_plan

__all__ = ["Plan", "make_plan"]
