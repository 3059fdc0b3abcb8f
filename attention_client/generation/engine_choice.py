"""Choice of the attention client's engine at start: continuous batching, or one request at a time."""

from __future__ import annotations

import logging
from typing import Any

from attention_client.engines.transformers.compiled.compiler import PassCompiler
from attention_client.engines.transformers.paged.model import can_be_paged
from attention_client.generation.batching import BatchingEngine
from attention_client.generation.live_admission import LiveAdmission
from attention_client.generation.sequential import SequentialEngine
from attention_client.generation.sizes import EngineSizes
from attention_client.layer_call.expert_attribution import ExpertAttribution
from eaas.generation.work import Engine

__all__ = ["build_engine"]

_LOG = logging.getLogger(__name__)


def build_engine(
    model: Any,
    sizes: EngineSizes,
    admission: LiveAdmission,
    attribution: ExpertAttribution,
    compiler: PassCompiler | None = None,
) -> Engine:
    """Build a `BatchingEngine` if the model's attention fits the paged cache, else a `SequentialEngine`.

    Args:
        model: A transformers causal language model.
        sizes: Sizes of cache and batch.
        admission: Chooses the requests that enter the batch. A `SequentialEngine` does not use it.
        attribution: Records which servers compute a token's experts, for requests that ask.
        compiler: Compiles the forward passes of a `BatchingEngine`; None: they stay uncompiled.

    Raises:
        ConfigError: The cache does not fit into memory.
    """
    attention = model.config._attn_implementation
    reason = f"the paged cache does not serve {model.dtype} on {model.device}"
    if can_be_paged(model):
        try:
            engine = BatchingEngine(model, sizes, admission, attribution)
        except ValueError as error:
            reason = str(error)
            model.set_attn_implementation(attention)  # the attempt may have set a paged one
        else:
            if compiler is not None:
                compiler.start(engine.use_compiled)
            return engine
    _LOG.warning("%s is served one request at a time: %s", type(model).__name__, reason)
    admission.decline()
    return SequentialEngine(model, attribution)
