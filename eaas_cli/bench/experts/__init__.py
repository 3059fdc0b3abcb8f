"""Expert kernels against the machine's limits and against transformers, in one run."""

from eaas_cli.bench.experts.plan import Plan, make_plan
from eaas_cli.bench.experts.run import bench_experts

__all__ = ["Plan", "bench_experts", "make_plan"]
