"""The document of `python -m benchmarks.join`."""

from __future__ import annotations

import pytest

from benchmarks.join import bench_join
from benchmarks.join.report import print_report
from eaas_cli.local.fork_server import ForkServer


@pytest.mark.integration
@pytest.mark.timeout(300)
def test_a_join_from_each_source(
    capsys: pytest.CaptureFixture[str], fork_server: ForkServer
) -> None:
    said: list[str] = []
    document = bench_join(
        share_bytes=100_000_000,
        sources=("disk", "peers"),
        tokens=4,
        calls_per_s=20.0,
        quiet_s=0.5,
        rounds=1,
        say=said.append,
        fork_server=fork_server,
    )
    # Eight experts of 3 MiB in each of eight layers are the least that there can be.
    assert document["share_bytes"] == 32 * (3 << 20)
    assert [row["source"] for row in document["rows"]] == ["disk", "peers"]
    for row in document["rows"]:
        assert row["calls"]["before"] >= 5
        assert row["calls"]["meanwhile"] >= 1
        assert row["start_to_serving_s"] >= row["join_s"]
        rate = document["share_bytes"] / row["join_s"] / 1e6
        assert row["join_mb_per_s"] == pytest.approx(rate, rel=0.02)
        assert row["ratio"]["rate"] == pytest.approx(rate / row["medium_mb_per_s"], rel=0.05)
        slowest = row["meanwhile_ms"]["slowest"] / row["before_ms"]["p99"]
        assert row["ratio"]["slowest"] == pytest.approx(slowest, rel=0.05, abs=0.01)
    assert document["rows"][1]["medium_mb_per_s"] <= document["limit_bytes_per_s"] / 1e6
    print_report(document)
    assert "share: 101 MB" in capsys.readouterr().out
    assert len(said) == 3
