"""Bytes carried by the network."""

from __future__ import annotations

from expert_server.load_report.links import carried, read_carried

TABLE = """Inter-| Receive            | Transmit
 face |bytes packets and six more|bytes packets and so on
    lo: 9999 41 0 0 0 0 0 0 9999 41 0 0 0 0 0 0
  eth0:1000 7 0 0 0 0 0 0 300 5 0 0 0 0 0 0
  ib0: 50 1 0 0 0 0 0 0 7 1 0 0 0 0 0 0
"""


def test_all_but_the_loopback() -> None:
    assert carried(TABLE) == (1050, 307)
    assert carried("\n".join(TABLE.splitlines()[:3])) == (0, 0)


def test_carried_bytes_of_this_machine() -> None:
    assert all(number >= 0 for number in read_carried())
