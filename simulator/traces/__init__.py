"""Routing traces: how many tokens went to each expert, iteration by iteration.

    trace      the value: counts (I, L, E) and notes on their origin
    file       our own compact .npz
    readers    .npz, .npy, .csv and SGLang's .pt, distinguished by their suffixes
    generator  synthetic traces in named regimes
    record     traces of a checkpoint's own routing

Letters: I iterations (forward passes), L MoE layers, E logical experts.
"""

from simulator.traces.file import write_trace
from simulator.traces.generator import generate_trace
from simulator.traces.readers import read_trace
from simulator.traces.regimes import REGIMES, Regime
from simulator.traces.trace import Trace

__all__ = ["REGIMES", "Regime", "Trace", "generate_trace", "read_trace", "write_trace"]
