"""Routing traces: how many tokens went to each expert, iteration by iteration.

    trace      the value: counts (I, L, E) and notes on where they come from
    file       our own compact .npz
    readers    .npz, .npy, .csv and SGLang's .pt, told apart by their names
    generator  synthetic traces in named regimes
    record     a checkpoint's own routing

Letters: I iterations (forward passes), L MoE layers, E logical experts.
"""

from eaas.trace.file import write_trace
from eaas.trace.generator import generate_trace
from eaas.trace.readers import read_trace
from eaas.trace.regimes import REGIMES, Regime
from eaas.trace.trace import Trace

__all__ = ["REGIMES", "Regime", "Trace", "generate_trace", "read_trace", "write_trace"]
