"""`eaas up` as a process: its output, its endpoint, and the files and processes that it must clean up."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from waiting import eventually

# Test modules share fixtures: pytest's importlib mode cannot import siblings.
ROOT = Path(__file__).parents[2]
EAAS = (sys.executable, "-m", "eaas_cli")
PROMPT = "Once upon a time"
LONG = 96


class Home:
    """A temporary directory of one `eaas up`, in the environment of its processes."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir()
        self.environment = os.environ | {"TMPDIR": str(directory)}

    def run(self, *arguments: str, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        return subprocess.run(
            [*EAAS, *arguments],
            cwd=ROOT,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    def processes(self) -> dict[int, str]:
        """Pid -> command line of the processes that live here."""
        mark = f"TMPDIR={self.directory}".encode()
        found = {}
        for entry in Path("/proc").iterdir():
            # Processes may end meanwhile.
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
                    if command:
                        found[int(entry.name)] = command
        return found

    def assert_nothing_left(self, within_s: float = 10.0) -> None:
        deadline = time.monotonic() + within_s
        while (left := self.processes() or self.files()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not left

    def kill_all(self) -> None:
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def files(self) -> list[str]:
        """Directories, sockets and shared-memory files of ours."""
        return [
            str(path)
            for place in (self.directory, Path("/dev/shm"))
            for path in place.iterdir()
            if "eaas" in path.name or path.is_socket()
        ]


class Up:
    """A running `eaas up`."""

    def __init__(
        self, home: Home, model: Path, *options: str, python: str = sys.executable
    ) -> None:
        self.home = home
        self.output_file = home.directory / "up.out"
        with self.output_file.open("wb") as output:
            self.process = subprocess.Popen(
                [python, *EAAS[1:], "up", "--model", str(model), "--port", "0", *options],
                cwd=ROOT,
                # Another environment's entry points may be those of another directory.
                env=home.environment | {"PYTHONPATH": str(ROOT)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self.output_file.read_text()

    def wait_serving(self) -> None:
        self.wait_output("(SERVING)")
        self.wait_output("(Ctrl-C ends)")

    def wait_output(self, pattern: str, timeout_s: float = 90.0) -> str:
        """The first group of the last match."""
        deadline = time.monotonic() + timeout_s
        while True:
            found = re.findall(pattern, self.output)
            if found:
                return str(found[-1])
            assert self.process.poll() is None, self.output
            assert time.monotonic() < deadline, self.output
            time.sleep(0.05)

    @property
    def endpoint(self) -> str:
        """URL without /v1; waits until it is printed."""
        return self.wait_output(r"endpoint: (http://\S+)/v1")

    def status(self) -> dict[str, Any]:
        """The document of `eaas status --json`, without its process."""
        response = httpx.get(f"{self.endpoint}/eaas/v1/status", timeout=10)
        assert response.status_code == 200
        return dict(response.json())

    def member(self, name: str) -> dict[str, Any]:
        (found,) = [m for m in self.status()["members"] if m["id"] == name]
        return dict(found)

    def stream(self, after: int = 0, then: Callable[[], object] = lambda: None) -> str:
        """The long greedy completion; `then` is called after that many chunks of it."""
        body = {"prompt": PROMPT, "max_tokens": LONG, "temperature": 0, "stream": True}
        url = f"{self.endpoint}/v1/completions"
        text, chunks = "", 0
        with httpx.stream("POST", url, json=body, timeout=60) as response:
            assert response.status_code == 200
            for line in response.iter_lines():
                data = line.removeprefix("data: ")
                if not line.startswith("data: ") or data == "[DONE]":
                    continue
                document = json.loads(data)
                if "error" in document:
                    raise openai.APIError(str(document), request=response.request, body=document)
                text += "".join(choice["text"] for choice in document["choices"])
                chunks += 1
                if chunks == after:
                    then()
        assert chunks > after
        return text

    def paste(self, line: str) -> subprocess.Popen[bytes]:
        """Run a printed line in another shell and directory; an uninstalled package is found."""
        return subprocess.Popen(
            ["bash", "-c", f"exec {line}"],
            cwd="/",
            env=self.home.environment | {"PYTHONPATH": str(ROOT)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    until = staticmethod(eventually)

    def signal(self, number: signal.Signals) -> None:
        """Signal the process group, as a terminal does."""
        os.killpg(self.process.pid, number)

    def end(self) -> None:
        """End all processes."""
        self.home.kill_all()
        self.process.wait(10)


@pytest.fixture(scope="session")
def root() -> Path:
    """Root of the repository."""
    return ROOT


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    """A temporary directory for commands."""
    home = Home(tmp_path / "home")
    yield home
    home.kill_all()


@pytest.fixture(scope="module")
def start_up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Up]]:
    """Start `eaas up`; the module ends what still runs."""
    started: list[Up] = []

    def start(model: Path, *options: str, python: str = sys.executable) -> Up:
        home = Home(tmp_path_factory.mktemp("home") / "tmp")
        started.append(Up(home, model, *options, python=python))
        return started[-1]

    yield start
    for up in started:
        up.end()


@pytest.fixture(scope="session")
def shell_model(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint at a path that a shell must quote."""
    path = tmp_path_factory.mktemp("models") / "it's a demo"
    shutil.copytree(checkpoint("qwen3_moe"), path)
    return path


@pytest.fixture(scope="session")
def prompt() -> tuple[str, int]:
    """Prompt and length of the completion of `Up.stream`."""
    return PROMPT, LONG


@pytest.fixture(scope="session")
def eager_text(shell_model: Path) -> str:
    """The completion of `Up.stream` by plain transformers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(shell_model)
    eager = AutoModelForCausalLM.from_pretrained(shell_model, experts_implementation="eager").eval()
    ids_BT = tokenizer(PROMPT, return_tensors="pt").input_ids
    out_BT = eager.generate(ids_BT, max_new_tokens=LONG, do_sample=False)
    text: str = tokenizer.decode(out_BT[0, ids_BT.shape[1] :], skip_special_tokens=True)
    return text
