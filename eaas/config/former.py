"""Former names of settings, commands and options, and words of other programs, each with its successor."""

__all__ = ["FORMER_COMMANDS", "FORMER_OPTIONS", "FORMER_SETTINGS"]

_OF_THE_FRONTEND = (
    *("host", "port", "api_key_file", "allowed_hosts", "allowed_origins", "served_model_name"),
    *("response_template", "stored_responses", "dashboard", "operator_page"),
)
FORMER_SETTINGS = {
    "balancer.ack_timeout_s": "is fixed at 10 s",
    "balancer.drift_tv": "is fixed at 0.2",
    "balancer.drift_tolerance": "is fixed at 0.2",
    "balancer.least_gain": "is fixed at 0.02",
    "balancer.horizon_s": "is fixed at 600 s",
    "balancer.latency_target_ms": "is autoscaler.latency_target_ms, which live knobs hold, too",
    "autoscaler.tolerance": "is fixed at 0.15",
    "expert_server.spin_us": "is fixed at 20 us",
    "attention_client.spin_us": "is fixed at 20 us",
    "attention_client.cache_block_tokens": "is fixed at 64; set cache_blocks for a larger cache",
    **{f"attention_client.{n}": f"is frontend.{n}" for n in _OF_THE_FRONTEND},
    "attention_client.scheduler.most_stretch": "went with the strategy cost_bounded",
    "attention_client.scheduler.weight_pairs": "went with the strategy cost_bounded",
    "attention_client.scheduler.predicted_layers": "is fixed at 1",
}
"""Removed settings of earlier versions, and their replacements."""

_CLONE = "now `python -m benchmarks.{}`, in a clone of the repository"
_FIGURES = "gone; docs/performance.md and docs/scheduling.md keep its figures"

FORMER_COMMANDS = {
    **{f"bench {n}": _CLONE.format(n) for n in ("client", "dispatch", "failover", "policies")},
    "bench monitor": _CLONE.format("scale --only monitor"),
    "bench join": _FIGURES,
    "bench overlap": _FIGURES,
    "bench predict": _FIGURES,
    "bench rebalance": _FIGURES,
    "bench select": _FIGURES,
    "bench traces": _FIGURES,
    "simulate policy": _CLONE.format("caps judge"),
    "simulate fit": _CLONE.format("caps fit"),
    "simulate replay": _CLONE.format("caps replay"),
    "simulate validate": "gone; docs/scheduling.md keeps its figures",
    "knobs": "gone; docs/policies.md keeps its figures",
    # What people type who know vllm, docker or ollama.
    "serve": "`eaas up DIR` here",
    "run": "`eaas up DIR` here",
    "start": "`eaas up DIR` here",
    "stop": "`eaas down` here",
    "ps": "`eaas status` here",
    "list": "`eaas status` here",
    "ls": "`eaas status` here",
    "chat": "`eaas generate PROMPT` here",
    "help": "`eaas --help` here",
}
"""Commands that are no longer or never were, and what to give in their place."""

FORMER_OPTIONS = {
    "vllm --operator-page": "an option of the page's own process, `eaas frontend --page-only`",
    "bench experts --builtin": "gone: without --shape the built-in shapes are measured",
    "bench experts --no-builtin": "gone: --shape takes the place of the built-in shapes",
    "simulate caps --out": "gone: --json prints the document, --plot FILE.png draws it",
}
"""Removed options of commands, and what to give in their place."""
