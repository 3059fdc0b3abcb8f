"""The shipped traces of the demo model and of gpt-oss-20b."""

import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from scripts import script
from simulator.routing import total_variation
from simulator.traces import Trace, read_trace, write_trace

EXAMPLES = Path(__file__).parents[3] / "examples"
TRACES = EXAMPLES / "traces"
DOMAINS = ("code", "prose", "german", "manual")


@pytest.fixture(scope="module")
def compare_domains() -> ModuleType:
    return script(EXAMPLES / "compare_domains.py")


@pytest.mark.parametrize("name", [*DOMAINS, "turns"])
def test_the_shipped_traces(name: str) -> None:
    trace = read_trace(TRACES / f"{name}.npz")
    assert trace.counts_ILE.shape[1:] == (8, 32)
    assert trace.notes["model"] == "demo"
    assert trace.notes["experts"] == "in a cluster"
    # Every token goes to four experts of each layer.
    per_layer = trace.counts_ILE.sum(axis=2, dtype=np.int64)
    assert (per_layer == per_layer[:, :1]).all()
    assert (per_layer % trace.notes["top_k"] == 0).all()
    assert trace.notes["top_k"] == 4
    assert sum(path.stat().st_size for path in TRACES.glob("*.npz")) <= 300_000


def test_domains_use_different_experts(compare_domains: ModuleType) -> None:
    """Domains differ far more than two parts of one; a plan for one is worse for the others."""
    distance_DD, par_DD = compare_domains.main()
    apart = distance_DD[~np.eye(4, dtype=bool)]
    assert apart.min() > 2 * distance_DD.diagonal().max()
    # In each column the plan made for that load serves it best.
    assert (par_DD.argmin(axis=0) == np.arange(4)).all()


def test_the_comparison_sees_no_difference_between_equal_domains(compare_domains, tmp_path) -> None:
    counts_ILE = np.random.default_rng(1).poisson(5.0, (400, 2, 16)).astype(np.uint8)
    for i, domain in enumerate(DOMAINS):
        write_trace(Trace(counts_ILE[i * 100 : i * 100 + 100]), tmp_path / f"{domain}.npz")
    distance_DD, par_DD = compare_domains.main(tmp_path)
    assert distance_DD.max() < 0.05
    assert par_DD.max() < 1.1


GPT_OSS = Path(__file__).parents[3] / "examples" / "traces" / "gpt-oss-20b"


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    return script(GPT_OSS / "make_traces.py")


def test_the_shipped_traces_of_gpt_oss() -> None:
    domains, mixed = (read_trace(GPT_OSS / f"{name}.npz") for name in ("domains", "mixed"))
    for trace in (domains, mixed):
        assert trace.counts_ILE.shape == (2963, 24, 32)
        assert trace.notes["model"] == "openai/gpt-oss-20b"
        assert "Apache-2.0" in trace.notes["source"]
        per_layer = trace.counts_ILE.sum(axis=2, dtype=np.int64)
        # Four experts of each of 64 tokens, in each layer; the last pass has the rest.
        assert (per_layer[:-1] == 4 * 64).all()
        assert (per_layer[-1] == 4 * (189_589 % 64)).all()
        # A token goes to an expert once.
        assert trace.counts_ILE.max() <= 64
    assert sum(domains.notes["domains"].values()) == 189_589
    sums = [trace.counts_ILE.sum(axis=0, dtype=np.int64) for trace in (domains, mixed)]
    assert np.array_equal(*sums)
    assert sum(path.stat().st_size for path in GPT_OSS.iterdir()) < 3_500_000


def test_domains_are_apart_and_the_mix_is_not() -> None:
    def change(name: str) -> float:
        counts_ILE = read_trace(GPT_OSS / f"{name}.npz").counts_ILE
        half = len(counts_ILE) // 2
        early, late = (c.sum(axis=0, dtype=float) for c in (counts_ILE[:half], counts_ILE[half:]))
        return float(total_variation(early, late).mean())

    assert change("domains") > 5 * change("mixed")


def answer(path: Path, ids_NLK: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    tokens = [
        {f"token_{100 + i}": {f"layer_{j}": {"selected_experts": k} for j, k in enumerate(layers)}}
        for i, layers in enumerate(ids_NLK.tolist())
    ]
    path.write_text(json.dumps({"original_prompt": "SECRET", "router_data": tokens}))


def test_the_script_counts_answers_as_they_are_batched(maker, tmp_path, capsys) -> None:
    rng = np.random.default_rng(0)
    lengths = {
        "mmlu_dev/professional_law": 100,
        "gpqa_main/Genetics": 40,
        "mmlu_dev/college_physics": 7,
        "tulu3_persona_if/instruction-following": 1,
        "sorry_bench_base/Stalking": 9,
    }
    routed = {
        subject: np.argsort(rng.random((length, 24, 32)), axis=2)[..., :4]
        for subject, length in lengths.items()
    }
    for subject, ids_NLK in routed.items():
        answer(tmp_path / "data" / subject / "False_True_examples.json", ids_NLK)
    again = tmp_path / "data/mmlu_test/professional_law/False_True_examples.json"
    answer(again, routed["mmlu_dev/professional_law"])
    (again.parent / "False_True.json").write_text("{}")

    maker.main(tmp_path, tmp_path)
    assert capsys.readouterr().out.startswith("4 answers, 148 tokens: ")
    counted = [ids for subject, ids in routed.items() if "sorry" not in subject]
    total_LE = sum(
        np.stack([np.bincount(ids[:, layer].ravel(), minlength=32) for layer in range(24)])
        for ids in counted
    )
    for name in ("domains", "mixed"):
        trace = read_trace(tmp_path / f"{name}.npz")
        assert trace.counts_ILE.shape == (3, 24, 32)
        assert np.array_equal(trace.counts_ILE.sum(axis=0, dtype=np.int64), total_LE)
        assert b"SECRET" not in (tmp_path / f"{name}.npz").read_bytes()
    domains = read_trace(tmp_path / "domains.npz").notes["domains"]
    assert {name: count for name, count in domains.items() if count} == {
        "science": 47,
        "law": 100,
        "other": 1,
    }


def test_continuous_batching_takes_a_token_of_each_answer(maker, monkeypatch) -> None:
    monkeypatch.setattr(maker, "BATCH", 2)
    queue = [
        np.array([[[10 * number + i]] for i in range(length)])
        for number, length in enumerate((1, 4, 2))
    ]
    # The third answer begins in the step after the first one's last.
    assert maker.batched(queue).ravel().tolist() == [0, 10, 11, 20, 12, 21, 13]
