"""`--load-format eaas`: vLLM's default loader, without the routed experts' tensors.

Loading joins the cluster first, because each layer must know its place among the MoE layers. The other
weights of a quantised checkpoint are dequantised here: vLLM builds a model that is not quantised.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from safetensors import safe_open
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.utils import get_model_architecture

from attention_client.engines.vllm import remote
from attention_client.engines.vllm.layer import refuse_local_experts, replace_routed_experts
from attention_client.engines.vllm.member import join
from attention_client.engines.vllm.settings import NOT_QUANTIZED, SECTION, read_settings
from eaas.checkpoint import Checkpoint
from eaas.errors import ConfigError

__all__ = ["ExpertlessLoader"]


class ExpertlessLoader(DefaultModelLoader):  # type: ignore[misc]
    """Loads a model without reading an expert's tensor; joins the cluster that computes the experts."""

    def __init__(self, load_config: Any) -> None:
        super().__init__(load_config)
        self._checkpoint: Checkpoint | None = None

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> Any:
        """Join the cluster, then build and load the model.

        Raises:
            ConfigError: The section `eaas` is missing or wrong, or vLLM would build quantised layers.
            CheckpointError: The model cannot be served.
            ClusterError: The monitor does not answer, or the servers do not cover the experts.
        """
        settings = read_settings(vllm_config.additional_config)
        self._checkpoint = checkpoint = Checkpoint.open(model_config.model)
        if checkpoint.is_quantized:
            _refuse_quantized_layers(model_config)
        # vLLM hashes this section into the key of its compile cache. The graph depends on the engine, not on
        # the address of the cluster.
        vllm_config.additional_config[SECTION] = {"experts": "remote"}
        parallel = vllm_config.parallel_config
        worker = parallel.data_parallel_rank * parallel.world_size + parallel.rank
        remote.attach(join(settings, checkpoint.shape, worker), settings.client.patience_s)
        # This imports the model's code, which may have its own subclass of RoutedExperts.
        get_model_architecture(model_config)
        replace_routed_experts()
        return super().load_model(vllm_config, model_config, prefix)

    def create_model(self, *args: Any, **kwargs: Any) -> Any:
        """Build the model, and check that all of its experts are remote."""
        model = super().create_model(*args, **kwargs)
        refuse_local_experts(model)
        return model

    def get_all_weights(self, model_config: Any, model: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Read the weights of the checkpoint, except the experts', with the names that the model expects.

        Those of a quantised checkpoint are dequantised, one at a time, to the model's dtype.
        """
        checkpoint = self._checkpoint
        assert checkpoint is not None
        # vLLM logs how long the loading took since then.
        self.counter_before_loading_weights = time.perf_counter()
        if checkpoint.is_quantized:
            for name in sorted(checkpoint.other_keys()):
                weight = checkpoint.slice(name)[...]
                yield name, weight.to(model_config.dtype) if weight.is_floating_point() else weight
            checkpoint.release()
            return
        experts = checkpoint.expert_keys()
        shards: dict[str, list[str]] = defaultdict(list)
        for name, shard in checkpoint.keys.items():
            if name not in experts:
                shards[shard].append(name)
        for shard, names in shards.items():
            with safe_open(checkpoint.path / shard, framework="pt") as file:
                for name in names:
                    yield name, file.get_tensor(name)


def _refuse_quantized_layers(model_config: Any) -> None:
    """Check that vLLM builds layers without quantisation. Raises ConfigError."""
    for config in (model_config.hf_config, model_config.hf_text_config):
        if getattr(config, "quantization_config", None) is not None:
            raise ConfigError(
                f"{model_config.model} is quantised, and its weights reach vLLM dequantised: start vLLM with "
                f"`eaas vllm`, or add --hf-overrides '{NOT_QUANTIZED}'"
            )
        # Some models look into the section if there is one, even if it is None.
        vars(config).pop("quantization_config", None)
