"""What the processes of a cluster on Ray reserve."""

from __future__ import annotations

from eaas.config import load_config
from eaas_cli.commands.up_on_ray import reserved
from eaas_cli.local.memory import MemoryNeed

NEED = MemoryNeed(experts=8 << 30, replicas=2, others=1 << 30)


def test_a_server_reserves_its_experts_memory_or_a_gpu() -> None:
    on_cpu = reserved(load_config(), NEED, 4)
    assert on_cpu["expert_server"]["memory"] > 4 << 30
    assert "GPU" not in on_cpu["expert_server"]
    device = {"device": "cuda"}
    on_gpu = reserved(load_config(expert_server=device), NEED, 4)
    assert on_gpu["expert_server"]["GPU"] == 1
    assert on_gpu["expert_server"]["memory"] < 1 << 30
    assert on_gpu["attention_client"] == on_cpu["attention_client"]
    settings = load_config(expert_server=device, ray={"expert_server": {"GPU": 0.5}})
    assert reserved(settings, NEED, 4)["expert_server"]["GPU"] == 0.5
