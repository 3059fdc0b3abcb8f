"""The options of every command and their defaults: a public interface."""

from __future__ import annotations

import json
from typing import Any

__all__ = ["OPTIONS"]

# COMMAND: OPTION=DEFAULT as JSON (a string without quotes, unless it would be a number); no default: None.
_TEXT = """\
up: directory --model --on=local --servers --devices --redundancy=2 --clients=1 --engine=transformers
    --transport --host --port --kernel --quantization --served-model-name --api-key-file --tls
    --insecure=false --config --log-dir
down: --on --endpoint
status: --endpoint=URL --api-key-file --tls --json=false
top: --endpoint=URL --once=false --api-key-file --tls --json=false
generate: prompt --endpoint=URL --max-tokens=64 --temperature --api-key-file --json=false
scale: servers --endpoint=URL --api-key-file --tls
drain: server --endpoint=URL --api-key-file --tls
plan: --policy --more-servers=0 --without --redundancy --redundant-experts --endpoint=URL
    --api-key-file --tls --json=false
rebalance: --policy --force=false --endpoint=URL --api-key-file --tls --json=false
pin: layer expert server --endpoint=URL --api-key-file --tls
unpin: layer expert server --endpoint=URL --api-key-file --tls
history: --limit=20 --endpoint=URL --api-key-file --tls --json=false
policy: name --knob --endpoint=URL --api-key-file --tls --json=false
autoscale: --endpoint=URL --join --min-servers --max-servers --dry-run=false --api-key-file --tls
    --config
certs: directory --days=30 --san --renew=false
demo-model: directory --like --arch=qwen3_moe --layers=4 --hidden=128 --experts=16 --top-k=4 --seed=0
    --dtype=float32
bench serve: --model --servers=3 --redundancy=2 --transport=shm --requests=16 --concurrency=4
    --prompt-tokens=32 --max-tokens=64 --rounds=3 --baseline=transformers --json=false
bench experts: --shape --tokens --dtype --kernel --rounds --device=cpu --tune=false
    --threads --plot --json=false
simulate caps: --requests=3000 --seeds=42,123,456,789 --rates=150,200,250,300 --pattern=both
    --strategies --routing --plot --json=false
chaos run: --seed=1 --minutes=1.0 --faults= --model --servers=4 --redundancy=2 --transport=shm
    --rate=4.0 --max-tokens=24 --history --json=false
simulate autoscale: --trace --time-unit --paper=false --fixed=8,16,32 --start --max-servers
    --server-tokens-per-s --token-ms=50.0 --prompt-tokens=256 --change-s=10.0 --config --json=false
trace record: target --model --prompts --batch=8 --max-tokens=32 --temperature=0.0 --endpoint
trace generate: target --regime=skewed --iterations=6144 --layers=58 --experts=256 --tokens=1024
    --top-k=8 --seed=0
trace info: source --against --json=false
trace convert: source target --kind --experts --tokens --array
trace compare: source --policy --servers="64" --interval=256,1024 --slots --planning="0.4" --nodes
    --racks=1 --plot
    --json=false
expert-server: --model --join --id --host --port --threads --core --device --kernel --quantization
    --slots --slot-tokens --tls --insecure=false --config
attention-client: --model --join --id --engine-host --engine-port --metrics-port --transport --threads
    --tls --insecure=false --config
frontend: --model --join --id --page-only=false --host --port --api-key-file --operator-page
    --served-model-name --tls --insecure=false --config
vllm: model options --join --id --host --port --transport --api-key-file --served-model-name --tls
    --insecure=false --config
monitor: --host --port --stop-members-on-exit --store --data-dir --zookeeper-hosts --tls
    --insecure=false --config
balancer: --join --servers --redundancy --host --port --tls --insecure=false --config
""".replace("=URL", "=http://127.0.0.1:8000")


def _default(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _options(text: str) -> dict[str, Any]:
    words = (word.partition("=") for word in text.split())
    return {name: _default(default) if equals else None for name, equals, default in words}


_COMMANDS = (line.partition(":") for line in _TEXT.replace("\n    ", " ").splitlines())
OPTIONS = {command: _options(options) for command, _, options in _COMMANDS}
