"""The prompt worker: a process of the attention client that reads large request bodies.

`pool` starts it with the descriptor of a `Connection`. The first message is the
settings (JSON), answered by an empty one when the worker is ready. Then each message is a class (MODULE:NAME)
and, after a line break, a body. Its answer is a line of JSON ({"request", "found", "lengths"} or {"error"}),
then the tokens of all prompts (4 bytes each).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import signal
import sys
from array import array
from multiprocessing.connection import Connection
from pkgutil import resolve_name
from typing import Any

from attention_client.serving.prompts.body import Body
from attention_client.serving.prompts.reader import ModelLimits, PromptReader
from eaas.generation.errors import ApiError

__all__ = ["main"]

_LOG = logging.getLogger(__name__)
_NICENESS = 10  # generation has priority
_MOST_MEMORY = 4 * 2**30  # bytes of address space
_OOM_SCORE = "1000"  # the kernel kills this process first if memory runs out


def main() -> None:
    """Run the worker process: read bodies until the endpoint closes the channel."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    if most == resource.RLIM_INFINITY or most > _MOST_MEMORY:
        resource.setrlimit(resource.RLIMIT_AS, (_MOST_MEMORY, most))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write(_OOM_SCORE)
    with contextlib.suppress(EOFError), Connection(int(sys.argv[1])) as channel:
        settings = json.loads(channel.recv_bytes())
        reader = PromptReader(_tokenizer(settings), ModelLimits(**settings["limits"]))
        os.nice(_NICENESS)
        channel.send_bytes(b"")
        while True:
            name, _, body = channel.recv_bytes().partition(b"\n")
            # The endpoint waits no longer than this. The alarm ends a long read if the endpoint has died.
            signal.alarm(settings["deadline_s"])
            channel.send_bytes(_answer(reader, resolve_name(name.decode()), body))
            signal.alarm(0)
            del body


def _tokenizer(settings: dict[str, Any]) -> Any:
    # Tokenizers do not need torch, whose import takes seconds and 200 MB.
    sys.modules["torch"] = None  # type: ignore[assignment]
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(settings["tokenizer"], local_files_only=True)
    tokenizer.chat_template = settings["chat_template"]
    return tokenizer


def _answer(reader: PromptReader, cls: type[Body], body: bytes) -> bytes:
    try:
        request, prompts = reader.read(cls, body)
    except Exception as error:  # noqa: BLE001 (sent to the client)
        failure = error
        if not isinstance(error, ApiError):
            _LOG.exception("a request could not be read")
            reason = f"The request could not be read: {type(error).__name__}: {error}"
            failure = ApiError(500, reason)
        # The arguments of ApiError.
        return json.dumps({"error": vars(failure)}).encode() + b"\n"
    tokens = array("I", (token for prompt in prompts for token in prompt))
    lengths = [len(prompt) for prompt in prompts]
    answer = {"request": request.settings(), "found": request.found, "lengths": lengths}
    return json.dumps(answer).encode() + b"\n" + tokens.tobytes()


if __name__ == "__main__":
    main()
