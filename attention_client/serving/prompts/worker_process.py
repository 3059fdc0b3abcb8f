"""The endpoint's side of the prompt worker: starts the process, sends it bodies, ends it."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from array import array
from dataclasses import asdict
from itertools import islice
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from attention_client.serving.api_error import ApiError
from attention_client.serving.prompts.body import Body, parse
from attention_client.serving.prompts.reader import ModelLimits
from attention_client.serving.prompts.worker import ENDPOINTS
from attention_client.serving.prompts.worker import __name__ as _WORKER

__all__ = ["WorkerProcess"]

_LOG = logging.getLogger(__name__)
_START_S = 60.0
_DEADLINE_S = 30
_END_S = 5.0
_ENVIRONMENT = {
    # A thread for each core would take its stack, which may be large, of the worker's limited address space.
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # Without this transformers warns about the missing torch.
    "TRANSFORMERS_VERBOSITY": "error",
}
_MARKS = {cls: mark for mark, cls in ENDPOINTS.items()}

_Request = TypeVar("_Request", bound=Body)


class WorkerProcess:
    """The prompt worker's process, which reads one body at a time.

    The methods block. Only one thread may call them, except `stop`, which is thread-safe.

    Args:
        tokenizer: A transformers tokenizer. The process loads it from the same directory.
        limits: Limits of prompts.
    """

    def __init__(self, tokenizer: Any, limits: ModelLimits) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._lock = threading.Lock()  # guards the fields below
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Connection[bytes, bytes] | None = None
        self._is_closed = False
        self.ready = False

    def start(self) -> None:
        """Start the worker process unless it runs; return when it is ready. Raises ApiError (503) if not."""
        if self.ready:
            return
        try:
            self._launch()
            settings = {
                "tokenizer": self._tokenizer.name_or_path,
                "chat_template": self._tokenizer.chat_template,
                "limits": asdict(self._limits),
                "deadline_s": _DEADLINE_S,
            }
            self._ask(json.dumps(settings).encode(), _START_S)
        except (OSError, EOFError) as error:
            self.stop()
            _LOG.error("the prompt worker does not start: %s", error)
            raise ApiError(
                503, "Large requests cannot be read now. Try again later.", code="overloaded"
            ) from error
        self.ready = True

    def read(self, cls: type[_Request], body: bytes) -> tuple[_Request, list[list[int]]]:
        """Read one body (`PromptReader.read`). Raises ApiError (503) if the process ends or cannot start."""
        self.start()
        try:
            reply = self._ask(_MARKS[cls] + body, _DEADLINE_S)
        except TimeoutError as error:
            self.stop()
            raise ApiError(
                400, f"The request could not be read within {_DEADLINE_S} s. Shorten it."
            ) from error
        except (OSError, EOFError) as error:
            self.stop()
            _LOG.warning("the prompt worker ended: %s", error)
            raise ApiError(
                503, "The process that reads large requests ended. Try again.", code="overloaded"
            ) from error
        end = 4 + int.from_bytes(reply[:4], "little")
        answer = json.loads(reply[4:end])
        if "error" in answer:
            raise ApiError(**answer["error"])
        request = parse(cls, answer["request"])
        request.restore(answer["found"])
        tokens = iter(array("I", reply[end:]))
        return request, [list(islice(tokens, length)) for length in answer["lengths"]]

    def _ask(self, message: bytes, timeout_s: float) -> bytes:
        """Send the worker a message, return its reply. TimeoutError ends it; raises OSError, EOFError."""
        with self._lock:
            process, channel = self._process, self._channel
        if process is None or channel is None:
            raise EOFError("it was stopped")
        expired = threading.Event()

        def expire() -> None:
            expired.set()
            process.kill()

        timer = threading.Timer(timeout_s, expire)
        timer.start()
        try:
            channel.send_bytes(message)
            return channel.recv_bytes()
        except (OSError, EOFError) as error:
            if expired.is_set():
                raise TimeoutError("it did not answer") from error
            raise
        finally:
            timer.cancel()

    def stop(self) -> None:
        """End the worker process, if it runs, after a failure or when it is idle. A later `read` restarts it.

        A `read` in another thread fails.
        """
        with self._lock:
            process = self._process
            self._process = self._channel = None
            self.ready = False
        if process is not None:
            process.kill()
            process.wait(_END_S)

    def close(self) -> None:
        """End the worker process, when the endpoint stops; it cannot be started again."""
        with self._lock:
            self._is_closed = True
        self.stop()

    def _launch(self) -> None:
        with self._lock:
            if self._is_closed:
                raise EOFError("the endpoint is stopping")
            channel, theirs = Pipe()
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", _WORKER, str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    env=os.environ | _ENVIRONMENT,
                )
            self._channel = channel
