"""`python -m prompt_attacker HOST:PORT BYTES KIND ...`: posts a large body of each kind repeatedly.

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
    "logit_bias": lambda size: {
        "prompt": "x",
        "logit_bias": {str(i): 1 for i in range(size // 13)},
    },
}


def body(kind: str, size: int) -> bytes:
    """Make a body of about `size` bytes that the endpoint refuses."""
    if kind == "nesting":
        return b'{"prompt":' + b"[" * (size // 2) + b"]" * (size // 2) + b"}"
    return json.dumps(BODIES[kind](size), separators=(",", ":")).encode()


def main() -> None:
    address, size, *kinds = sys.argv[1:]
    bodies = {kind: body(kind, int(size)) for kind in kinds}
    over, statuses = threading.Event(), Counter[int]()

    def attack(kind: str) -> None:
        path = "/v1/chat/completions" if kind in ("chat", "messages") else "/v1/completions"
        connection = http.client.HTTPConnection(address, timeout=60)
        while not over.is_set():
            connection.request("POST", path, bodies[kind], {"Content-Type": "application/json"})
            answer = connection.getresponse()
            answer.read()
            statuses[answer.status] += 1
        connection.close()

    attackers = [threading.Thread(target=attack, args=(kind,)) for kind in kinds]
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
