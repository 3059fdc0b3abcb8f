"""The memory that a model takes is stated, and refused where it is not free."""

import json
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from eaas.checkpoint import precheck
from eaas.errors import ConfigError
from eaas_cli.local.memory import MemoryNeed, memory_need


def checkpoint(path: Path, stored: torch.dtype = torch.float32, **config: str) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": "mixtral"} | config))
    tensors = {
        "model.layers.0.mlp.experts.0.w1.weight": torch.zeros(100, 10),
        "model.layers.0.mlp.shared_experts.w1.weight": torch.zeros(5, 10),
        "lm_head.weight": torch.zeros(50),
    }
    save_file({name: t.to(stored) for name, t in tensors.items()}, path / "model.safetensors")
    return path


def test_experts_count_once_for_each_replica(tmp_path: Path) -> None:
    files = precheck(checkpoint(tmp_path / "m"))
    need = memory_need(files, 2, 1, "none")
    assert (need.experts, need.replicas, need.others, need.total) == (4000, 2, 400, 8400)
    # Of 1,000 float32 weights. Each of 100 outputs has a float32 scale.
    assert need.smaller == (("int8", 0.35), ("int4", 0.225))
    assert memory_need(files, 3, 2, "int4") == MemoryNeed(900, 3, 800)


@pytest.mark.parametrize(
    ("config", "experts", "others"),
    [({}, 4000, 400), ({"dtype": "float16"}, 4000, 400), ({"torch_dtype": "bfloat16"}, 2000, 200)],
)
def test_float16_is_counted_as_it_is_computed(
    config: dict[str, str], experts: int, others: int, tmp_path: Path
) -> None:
    need = memory_need(precheck(checkpoint(tmp_path / "m", torch.float16, **config)), 1, 1, "none")
    assert (need.experts, need.others) == (experts, others)


BF16 = (("int8", 0.51), ("int4", 0.27))


@pytest.mark.parametrize(
    ("replicas", "smaller", "free_gb", "remedy"),
    [
        (2, BF16, 20, "give --redundancy 1 (16.0 GB) or --quantization int8 (16.2 GB), or"),
        (2, BF16, 16, "give --redundancy 1 (16.0 GB) or --quantization int4 (10.5 GB), or"),
        (2, BF16, 15, "give --quantization int4 (10.5 GB), or take another machine"),
        (3, BF16, 10.2, "give --quantization int8 --redundancy 1 (10.1 GB), or"),
        (4, BF16, 39, "give --redundancy 2 (28.0 GB) or --quantization int8 (28.5 GB), or"),
        (2, BF16[1:], 7.5, "give --quantization int4 --redundancy 1 (7.2 GB), or"),
        (2, BF16, 7, "no option makes it fit: take a machine with more memory"),
        (2, (), 16, "give --redundancy 1 (16.0 GB), or take another machine"),
        (1, (), 15, "no option makes it fit"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_fits(
    replicas: int, smaller: tuple[tuple[str, float], ...], free_gb: float, remedy: str
) -> None:
    need = MemoryNeed(12_000_000_000, replicas, 4_000_000_000, smaller)
    need.refuse_more_than(need.total)
    with pytest.raises(ConfigError, match=re.escape(f"and {free_gb:.1f} GB are free: {remedy}")):
        need.refuse_more_than(int(free_gb * 1e9))


@given(
    st.integers(1, 10**12),
    st.integers(1, 8),
    st.integers(0, 10**12),
    st.sampled_from([(), BF16, BF16[1:]]),
    st.integers(0, 10**13),
)
def test_each_named_figure_fits(
    experts: int, replicas: int, others: int, smaller: tuple[tuple[str, float], ...], free: int
) -> None:
    need = MemoryNeed(experts, replicas, others, smaller)
    if need.total <= free:
        need.refuse_more_than(free)
        return
    with pytest.raises(ConfigError) as caught:
        need.refuse_more_than(free)
    remedy = str(caught.value).rpartition(" GB are free: ")[2]
    named = [float(gb) for gb in re.findall(r"\(([0-9.]+) GB\)", remedy)]
    assert all(gb <= free / 1e9 + 0.05 for gb in named)
    least = experts * min([part for _, part in smaller], default=1.0) + others
    assert bool(named) == (least <= free)
