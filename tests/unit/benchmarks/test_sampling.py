from benchmarks.sampling.run import SETTINGS, bench_sampling


def test_every_setting_is_measured() -> None:
    document = bench_sampling(rows=3, vocabulary=400, rounds=2, device="cpu")
    assert list(document["step_ms"]) == list(SETTINGS)
    assert all(step_ms > 0 for step_ms in document["step_ms"].values())
