"""The prompt worker: a process of the attention client that reads large request bodies.

`worker_process.WorkerProcess` starts it with the number of a connection and sends its settings (JSON). The
worker sends an empty message when it is ready. It answers each message (a byte for the endpoint, then the
body) with one message: the length of the JSON (4 bytes), the JSON ({"request", "found", "lengths"} or
{"error"}), the tokens of all prompts (4 bytes each).
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
from typing import Any

from attention_client.serving.api_error import ApiError
from attention_client.serving.prompts.anthropic_body import CountRequest, MessagesRequest
from attention_client.serving.prompts.bodies import ChatRequest, CompletionRequest
from attention_client.serving.prompts.body import Body
from attention_client.serving.prompts.length import LengthBound, length_bound
from attention_client.serving.prompts.reader import ModelLimits, PromptReader
from attention_client.serving.prompts.responses_body import ResponsesRequest
from attention_client.serving.prompts.tokenize_bodies import DetokenizeRequest, TokenizeRequest

__all__ = ["ENDPOINTS", "main"]

_LOG = logging.getLogger(__name__)
_NICENESS = 10  # generation has priority
_MOST_MEMORY = 4 * 2**30  # bytes of address space
_OOM_SCORE = "1000"  # the kernel kills this process first if memory runs out

ENDPOINTS: dict[bytes, type[Body]] = {
    b"c": CompletionRequest,
    b"m": ChatRequest,
    b"t": TokenizeRequest,
    b"d": DetokenizeRequest,
    b"r": ResponsesRequest,
    b"a": MessagesRequest,
    b"n": CountRequest,
}
"""The first byte of a message, and the class of the body that follows."""


def main() -> None:
    """Run the worker process: read bodies until the endpoint closes the channel."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    if most == resource.RLIM_INFINITY or most > _MOST_MEMORY:
        resource.setrlimit(resource.RLIMIT_AS, (_MOST_MEMORY, most))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write(_OOM_SCORE)
    channel: Connection[bytes, bytes] = Connection(int(sys.argv[1]))
    with contextlib.suppress(EOFError, ConnectionError):
        settings = json.loads(channel.recv_bytes())
        limits = ModelLimits(**settings["limits"])
        tokenizer = _load(settings)
        reader = PromptReader(tokenizer, limits, _bound(tokenizer))
        os.nice(_NICENESS)
        channel.send_bytes(b"")
        while True:
            message = channel.recv_bytes()
            # The endpoint waits no longer than this. The alarm ends a long read if the endpoint has died.
            signal.alarm(settings["deadline_s"])
            channel.send_bytes(_answer(reader, message))
            signal.alarm(0)
            del message


def _load(settings: dict[str, Any]) -> Any:
    # Tokenizers do not need torch, whose import takes seconds and 200 MB.
    sys.modules["torch"] = None  # type: ignore[assignment]
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(settings["tokenizer"], local_files_only=True)
    tokenizer.chat_template = settings["chat_template"]
    return tokenizer


def _bound(tokenizer: Any) -> LengthBound | None:
    from transformers import PreTrainedTokenizerFast

    # A subclass with its own methods may change the text first.
    base = PreTrainedTokenizerFast
    same = ("__call__", "_encode_plus")
    if not isinstance(tokenizer, base) or any(
        getattr(type(tokenizer), name) is not getattr(base, name) for name in same
    ):
        return None
    backend = tokenizer.backend_tokenizer
    return length_bound(backend, json.loads(backend.to_str()))


def _answer(reader: PromptReader, message: bytes) -> bytes:
    try:
        request, prompts = reader.read(ENDPOINTS[message[:1]], message[1:])
        answer = {
            "request": request.settings(),
            "found": request.found(),
            "lengths": [len(prompt) for prompt in prompts],
        }
        return _packed(answer, [token for prompt in prompts for token in prompt])
    except ApiError as error:
        failure = error
    except Exception as error:  # noqa: BLE001 (sent to the client)
        _LOG.exception("a request could not be read")
        reason = f"The request could not be read: {type(error).__name__}: {error}"
        failure = ApiError(500, reason)
    # The arguments of ApiError.
    return _packed({"error": vars(failure)}, [])


def _packed(answer: dict[str, Any], tokens: list[int]) -> bytes:
    head = json.dumps(answer).encode()
    return len(head).to_bytes(4, "little") + head + array("I", tokens).tobytes()


if __name__ == "__main__":
    main()
