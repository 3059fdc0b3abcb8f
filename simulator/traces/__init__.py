"""Routing traces: how many tokens went to each expert, iteration by iteration.

    trace      the value: counts (I, L, E) and notes on their origin
    file       our own compact .npz
    readers    a table of formats: a reader for each suffix
    csv_file   the .csv of other programs
    sglang     the .pt of SGLang's recorder
    arrays     plain arrays of counts, or of the ids of each token's experts
    generator  synthetic traces in named regimes
    topics     the regimes in which experts are hot together
    record     traces of a checkpoint's own routing

Letters: I iterations (forward passes), L MoE layers, E logical experts.
"""

from simulator.traces.file import write_trace
from simulator.traces.generator import generate_trace
from simulator.traces.readers import read_trace
from simulator.traces.regimes import REGIMES, Regime
from simulator.traces.trace import Trace

__all__ = ["REGIMES", "Regime", "Trace", "generate_trace", "read_trace", "write_trace"]
