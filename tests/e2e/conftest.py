"""`eaas up` as a person starts it: a process, its output, and what it must not leave behind."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

# Sibling modules cannot be imported in pytest's importlib mode: what tests share are fixtures.
ROOT = Path(__file__).parents[2]
EAAS = (sys.executable, "-m", "eaas")


class Home:
    """A temporary directory of one `eaas up`, in the environment of its processes."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir()
        self.environment = os.environ | {"TMPDIR": str(directory)}

    def run(self, *arguments: str, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
        """A command that ends by itself."""
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
            # Processes end while one looks.
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

    def __init__(self, home: Home, model: Path, *options: str) -> None:
        self.home = home
        self.output_file = home.directory / "up.out"
        with self.output_file.open("wb") as output:
            self.process = subprocess.Popen(
                [*EAAS, "up", "--model", str(model), "--port", "0", *options],
                cwd=ROOT,
                env=home.environment,
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
        """Without /v1; of a cluster that serves."""
        return self.wait_output(r"endpoint: (http://\S+)/v1")

    def status(self) -> dict[str, Any]:
        """What `eaas status --json` prints (see `test_status_json`), without a process for each look."""
        response = httpx.get(f"{self.endpoint}/eaas/v1/status", timeout=10)
        assert response.status_code == 200
        return dict(response.json())

    def member(self, name: str) -> dict[str, Any]:
        (found,) = [m for m in self.status()["members"] if m["id"] == name]
        return dict(found)

    def signal(self, number: signal.Signals) -> None:
        """To the process group, as a terminal does."""
        os.killpg(self.process.pid, number)

    def end(self) -> None:
        """Whatever a test has left running."""
        for pid in self.home.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(10)


@pytest.fixture(scope="session")
def root() -> Path:
    """Of the repository."""
    return ROOT


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    """A temporary directory for commands, which is to be left as it was found."""
    home = Home(tmp_path / "home")
    yield home
    for pid in home.processes():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def start_up(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[..., Up]]:
    """Starts `eaas up`; what still runs at the end of the module is ended."""
    started: list[Up] = []

    def start(model: Path, *options: str) -> Up:
        home = Home(tmp_path_factory.mktemp("home") / "tmp")
        started.append(Up(home, model, *options))
        return started[-1]

    yield start
    for up in started:
        up.end()
