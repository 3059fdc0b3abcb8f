"""`python -m prompt_attacker HOST:PORT KIND BYTES CONNECTIONS`: posts a large body repeatedly.

Prints "attacking"; at the end of its input prints the number of answers by status, as one line of JSON.
"""

from __future__ import annotations

import http.client
import json
import sys
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

TEXT = "the quick brown fox "


def _chat(*messages: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text} for text in messages]} | fields


BODIES: dict[str, Callable[[int], dict[str, Any]]] = {
    "text": lambda size: {"prompt": TEXT * (size // len(TEXT))},
    "chat": lambda size: _chat(TEXT * (size // len(TEXT))),
    "messages": lambda size: _chat(*["hello there!"] * (size // 50)),
    "ids": lambda size: {"prompt": [1] * (size // 3)},
    "metadata": lambda size: {"prompt": "", "metadata": [{}] * (size // 4)},
    "logit_bias": lambda size: {
        "prompt": "x",
        "logit_bias": {str(i): 1 for i in range(size // 13)},
    },
    "tools": lambda size: _chat(
        "x",
        tools=[
            {"type": "function", "function": {"name": str(i), "parameters": {}}}
            for i in range(size // 80)
        ],
    ),
}


def body(kind: str, size: int) -> bytes:
    """Make a body of about `size` bytes that the endpoint refuses."""
    if kind == "nesting":
        return b'{"prompt":' + b"[" * (size // 2) + b"]" * (size // 2) + b"}"
    return json.dumps(BODIES[kind](size), separators=(",", ":")).encode()


def main() -> None:
    address, kind, size, connections = sys.argv[1:5]
    path = "/v1/chat/completions" if kind in ("chat", "messages", "tools") else "/v1/completions"
    data, over, statuses = body(kind, int(size)), threading.Event(), Counter[int]()

    def attack() -> None:
        connection = http.client.HTTPConnection(address, timeout=60)
        while not over.is_set():
            connection.request("POST", path, data, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            answer.read()
            statuses[answer.status] += 1
        connection.close()

    attackers = [threading.Thread(target=attack) for _ in range(int(connections))]
    for attacker in attackers:
        attacker.start()
    print("attacking", flush=True)
    sys.stdin.read()
    over.set()
    for attacker in attackers:
        attacker.join()
    print(json.dumps(statuses), flush=True)


if __name__ == "__main__":
    main()
