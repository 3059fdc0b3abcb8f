"""vLLM as the engine that runs attention: a plugin whose MoE layers ask a cluster's expert servers.

vLLM loads the entry point `vllm.general_plugins` in each of its processes. The plugin only adds the load
format `eaas`: without `--load-format eaas`, vLLM runs as if the plugin were not installed.
"""

from __future__ import annotations

__all__ = ["register"]


def register() -> None:
    """Add the load format `eaas`. vLLM calls this in each of its processes, before it builds a model."""
    # Imported here: other parts of the package need no vLLM.
    from attention_client.engines.vllm import contract
    from attention_client.engines.vllm.lifeline import end_with_supervisor

    end_with_supervisor()
    contract.register_load_format()
