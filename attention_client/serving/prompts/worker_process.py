"""The endpoint's side of the prompt worker: starts the process, sends it bodies, ends it."""

from __future__ import annotations

import json
import logging
import os
import socket
import struct
import subprocess
import sys
from array import array
from dataclasses import asdict
from itertools import islice
from multiprocessing.connection import Connection
from typing import Any

from attention_client.heap import trim_heap
from attention_client.serving.prompts.body import RequestT, parse
from attention_client.serving.prompts.reader import ModelLimits
from eaas.generation.errors import ApiError

__all__ = ["WorkerProcess"]

_LOG = logging.getLogger(__name__)
_WORKER = "attention_client.serving.prompts.worker"
_START_S = 60
_DEADLINE_S = 30
_END_S = 5.0
_ENVIRONMENT = {
    # A thread for each core would take its stack, which may be large, of the worker's limited address space.
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # Without this transformers warns about the missing torch.
    "TRANSFORMERS_VERBOSITY": "error",
}


class WorkerProcess:
    """The prompt worker's process, which reads one body at a time.

    The methods block. Only one thread may call them, except `close`.

    Args:
        tokenizer: A transformers tokenizer. The process loads it from the same directory.
        limits: Limits of prompts.
    """

    def __init__(self, tokenizer: Any, limits: ModelLimits) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Connection
        self._is_closed = False

    def read(self, cls: type[RequestT], body: bytes) -> tuple[RequestT, list[list[int]]]:
        """Read one body (`PromptReader.read`). Raises ApiError (503) if the process ends or cannot start."""
        try:
            self._start()
            name = f"{cls.__module__}:{cls.__name__}\n"
            reply = self._ask(name.encode() + body, _DEADLINE_S)
        except TimeoutError as error:
            self.stop()
            reason = f"The request could not be read within {_DEADLINE_S} s. Shorten it."
            raise ApiError(400, reason) from error
        except (OSError, EOFError) as error:
            self.stop()
            _LOG.warning("the prompt worker ended: %s", error)
            reason = "The process that reads large requests ended. Try again."
            raise ApiError(503, reason, code="overloaded") from error
        head, _, tokens = reply.partition(b"\n")
        answer = json.loads(head)
        if "error" in answer:
            raise ApiError(**answer["error"])
        request = parse(cls, answer["request"])
        request.found.update(answer["found"])
        ids = iter(array("I", tokens))
        return request, [list(islice(ids, length)) for length in answer["lengths"]]

    def stop(self) -> None:
        """End the process, if it runs, after a failure or when it is idle. A later `read` restarts it."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait(_END_S)
            self._channel.close()
            trim_heap()

    def close(self) -> None:
        """End the process, when the endpoint stops; it cannot be started again. A `read` fails."""
        self._is_closed = True
        self.stop()

    def _start(self) -> None:
        """Start the process unless it runs; return when it is ready. Raises OSError, EOFError."""
        if self._process is not None:
            return
        ours, theirs = socket.socketpair()
        # A worker that stops in the middle of a message fails it, too.
        for side in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            ours.setsockopt(socket.SOL_SOCKET, side, struct.pack("ll", _START_S, 0))
        self._channel = Connection(ours.detach())
        with theirs:
            command = [sys.executable, "-m", _WORKER, str(theirs.fileno())]
            self._process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=os.environ | _ENVIRONMENT,
            )
        if self._is_closed:
            raise EOFError("the endpoint is stopping")
        settings = {
            "tokenizer": self._tokenizer.name_or_path,
            "chat_template": self._tokenizer.chat_template,
            "limits": asdict(self._limits),
            "deadline_s": _DEADLINE_S,
        }
        try:
            self._ask(json.dumps(settings).encode(), _START_S)
        except TimeoutError as error:
            raise EOFError(f"it was not ready after {_START_S} s") from error

    def _ask(self, message: bytes, timeout_s: float) -> bytes:
        """Return the reply to a message. Raises TimeoutError, OSError, EOFError."""
        self._channel.send_bytes(message)
        if not self._channel.poll(timeout_s):
            raise TimeoutError
        return self._channel.recv_bytes()
