"""Runs in vLLM's environment: generate greedily from prompts, with local or remote experts.

Reads one JSON document from standard input: `model`, `engine` (arguments of `vllm.LLM`), `prompts` and
`max_tokens`.
Writes one JSON document to the file that its first argument names: `tokens` (a list for each prompt), and
`rss`, the largest resident memory of this process's descendants in bytes, once the model is loaded.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def descendants(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            found += [child, *descendants(child)]
    return found


def rss_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if "VmRSS" in line) * 1024


def main() -> None:
    from vllm import LLM, SamplingParams

    asked: dict[str, Any] = json.load(sys.stdin)
    llm = LLM(asked["model"], **asked["engine"])
    import os

    rss = max((rss_bytes(pid) for pid in descendants(os.getpid())), default=0)
    params = SamplingParams(temperature=0, max_tokens=asked["max_tokens"], ignore_eos=True)
    outputs = llm.generate(asked["prompts"], params)
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    Path(sys.argv[1]).write_text(json.dumps({"tokens": tokens, "rss": rss}))


if __name__ == "__main__":
    main()
