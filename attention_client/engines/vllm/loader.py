"""`--load-format eaas`: vLLM's default loader, without the routed experts' tensors.

Loading joins the cluster first, because each layer must know its place among the MoE layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from attention_client.engines.vllm import remote
from attention_client.engines.vllm.member import join
from attention_client.engines.vllm.settings import SECTION, read_settings
from eaas.checkpoint import Checkpoint

__all__ = ["ExpertlessLoader"]


class ExpertlessLoader(DefaultModelLoader):  # type: ignore[misc]
    """Loads a model without reading an expert's tensor; joins the cluster that computes the experts."""

    def __init__(self, load_config: Any) -> None:
        super().__init__(load_config)
        self._experts: frozenset[str] = frozenset()

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> Any:
        """Join the cluster, then build and load the model.

        Raises:
            ConfigError: The section `eaas` is missing or wrong.
            CheckpointError: The model cannot be served.
            ClusterError: The monitor does not answer, or the servers do not cover the experts.
        """
        from attention_client.engines.vllm.layer import replace_routed_experts

        settings = read_settings(vllm_config.additional_config)
        checkpoint = Checkpoint.open(model_config.model)
        self._experts = checkpoint.expert_keys()
        # What the base class reads; the experts' tensors are skipped below.
        self.load_config.load_format = "auto"
        # vLLM hashes this section into the key of its compile cache. The graph depends on the engine, not on
        # the address of the cluster.
        vllm_config.additional_config[SECTION] = {"experts": "remote"}
        remote.attach(
            join(settings, checkpoint.shape, vllm_config.parallel_config.rank), settings.patience_s
        )
        replace_routed_experts()
        return super().load_model(vllm_config, model_config, prefix)

    def _init_ep_weight_filter(self, model_config: Any) -> None:
        # vLLM's own filter of `.experts.N.` names: no expert is local.
        self.local_expert_ids: set[int] = set()

    def get_all_weights(self, model_config: Any, model: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of the checkpoint, except the experts'; skip shards that hold only those."""
        source = DefaultModelLoader.Source(
            model_config.model,
            model_config.revision,
            fall_back_to_pt=False,
            allow_patterns_overrides=getattr(model, "allow_patterns_overrides", None),
            is_unused_weight=self._experts.__contains__,
        )
        for name, tensor in self._get_weights_iterator(source):
            if name not in self._experts:
                yield name, tensor
