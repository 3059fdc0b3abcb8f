"""Where the HTTP endpoint reads a request body, so that reading delays no other request's stream.

Here, in a thread, or in the prompt worker: `python -m frontend.prompts.pool` with the
descriptor of a `Connection`. The first message is the settings (JSON), answered by an empty one when the
worker is ready. Then each message is a class (MODULE:NAME) and, after a line break, a body. Its answer is a
line of JSON ({"request", "found", "lengths"} or {"error"}), then the tokens of all prompts (4 bytes each).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
from array import array
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from itertools import islice
from multiprocessing.connection import Connection
from pkgutil import resolve_name
from typing import Any

from eaas.generation.errors import ApiError
from eaas.heap import trim_heap
from frontend.prompts.body import Body, RequestT, parse
from frontend.prompts.reader import ModelLimits, PromptReader

__all__ = ["PromptPool", "main"]

_LOG = logging.getLogger(__name__)
# Up to this size, reading takes less time than a switch to another thread.
_AT_ONCE_BYTES = 2 * 2**10
# JSON, pydantic and templates hold the interpreter's lock, which each step of the engine needs many times.
# A thread may hold it for milliseconds, but megabytes take longer.
_IN_THREAD_BYTES = 64 * 2**10
_IDLE_S = 10.0
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
# Of the worker.
_NICENESS = 10  # generation has priority
_MOST_MEMORY = 4 * 2**30  # bytes of address space
_OOM_SCORE = "1000"  # the kernel kills this process first if memory runs out


class PromptPool:
    """Reads small bodies at once, larger ones in a thread, large ones in a process, one at a time in each.

    The process starts for the first large body. When it is idle it ends, which frees its memory.
    """

    def __init__(self, tokenizer: Any, limits: ModelLimits) -> None:
        self._reader = PromptReader(tokenizer, limits)
        self._thread = ThreadPoolExecutor(1, "prompts")
        self._worker = _Worker(tokenizer, limits)
        self._worker_thread = ThreadPoolExecutor(1, "prompt-worker")  # waits for the worker
        self._large = 0  # bodies that wait for the worker, or are read there
        self._idle: asyncio.TimerHandle | None = None

    async def read(self, cls: type[RequestT], body: bytes) -> tuple[RequestT, list[list[int]]]:
        """Read one request body (`PromptReader.read`) where its size allows it to delay nobody.

        Raises ApiError (400, 503).
        """
        if len(body) <= _AT_ONCE_BYTES:
            return self._reader.read(cls, body)
        loop = asyncio.get_running_loop()
        if len(body) <= _IN_THREAD_BYTES:
            return await loop.run_in_executor(self._thread, self._reader.read, cls, body)
        self._large += 1
        if self._idle is not None:
            self._idle.cancel()
        try:
            return await loop.run_in_executor(self._worker_thread, self._worker.read, cls, body)
        finally:
            self._large -= 1
            if not self._large:
                self._idle = loop.call_later(_IDLE_S, self._end_worker)

    def close(self) -> None:
        """End the reading threads and the worker process, when the endpoint stops. Waiting reads fail."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._worker_thread.shutdown(wait=False, cancel_futures=True)
        self._worker.close()

    def _end_worker(self) -> None:
        with contextlib.suppress(RuntimeError):  # the pool is closed
            self._worker_thread.submit(self._worker.stop)


class _Worker:
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
            command = [sys.executable, "-m", __name__, str(theirs.fileno())]
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
            signal.alarm(_DEADLINE_S)
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
