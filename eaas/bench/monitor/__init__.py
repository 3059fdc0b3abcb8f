"""A monitor's process and more and more simulated members.

What is measured, and where:

    registry     a heartbeat and a tick without gRPC                                         core
    heartbeats   the monitor's processor time, memory and answers; nobody watches            stage
    watching     the same with watchers, and how soon they know that a member has ended      stage, run

A simulated member does on the wire what `MemberSession` does: Register, a Heartbeat stream with a message
each second, sent once the last was answered, and a Watch stream. It describes itself as a server or a
client of a model with 48 layers. It is simulated in what it costs: a few processes hold thousands of them
and make the frames of HTTP/2 by hand (`http2`), since gRPC's own client would take more of the machine than
the monitor that is measured. By default each has a connection of its own, as members have.

Watchers begin where the history is, as they do after a reconnect: how much a snapshot is, and what it
takes, is a figure of its own. An end is that of the last member, without a word (`death`: its streams
break, the lease tells; the heartbeat before it came up to a second earlier) or with one (`goodbye`).
`first` and `last` are when the first and the last watcher were told of DEAD, counted from the end itself;
`spread` is the time between them. Each is the worst of `deaths`.

The document of `eaas bench monitor --json`:

    machine      processor, cores, python, grpc, busy_cores (of the machine, on average)
    settings     interval_s, lease_s, per_connection, loaders, seconds, deaths
    registry     [members, heartbeat_us, tick_us]
    rows         [members, join_s, heartbeats {FIGURES}, snapshot {bytes, ms}, falsely_dead,
                  watching [watchers, FIGURES, goodbye_ms {ENDS}, death_ms {ENDS}]]
                 or [members, watching [], error]: they could not join, and no further step was taken
    breaks       members, watchers, what: the first thing that was not as it should be; null: nothing
    FIGURES      cpu_cores (of the monitor), cpu_us_per_heartbeat, rss_mb, heartbeats_per_s, late (turns at
                 which the last one was not answered yet), taken (share of answered ones of all turns),
                 ended (streams that the monitor ended), answer_ms {p50, p99, max}, watched_per_s (messages to
                 all watchers), signs_per_s (those that only say that nothing changed), out_of_turn
    ENDS         first, last, spread, not_told (watchers that did not know after 30 s)

A member whose stream the monitor has ended does not register again: the step ends there, without the ends
that were not measured yet. So it does where watchers are not told of an end.

Processes of members run on the same machine and take their part of it; `cpu_cores` is the monitor's alone.
"""

from eaas.bench.monitor.plan import Plan, make_plan

__all__ = ["Plan", "make_plan"]
