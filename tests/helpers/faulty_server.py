"""`python -m faulty_server`: the `eaas` program with an expert server that a test can slow down.

FAULTY_SERVERS names a directory with one file of 24 bytes per server, named after it: the least seconds that
a batch takes per visited expert (infinity: it never ends), batches begun, batches ended.

SPOKEN_VERSIONS in the environment, "1-2": imitate another release that speaks these protocol versions.
FAULTY_SERVER_NETWORK: the file of the network namespace to run in.
"""

from __future__ import annotations

import os
import struct
import sys
import time
from collections.abc import Callable
from mmap import mmap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from eaas_cli.chaos.child import enter_network

DIRECTORY = "FAULTY_SERVERS"
SPOKEN = "SPOKEN_VERSIONS"
NETWORK = "FAULTY_SERVER_NETWORK"
LAYOUT = struct.Struct("<dqq")
_POLL_S = 0.002


def open_control(path: Path) -> mmap:
    """Map the file, creating it if necessary."""
    with path.open("ab") as file:
        if file.tell() < LAYOUT.size:
            file.truncate(LAYOUT.size)
    with path.open("r+b") as file:
        return mmap(file.fileno(), LAYOUT.size)


class FaultyKernel:
    """A kernel with a configurable duration."""

    def __init__(self, kernel: Any, control: mmap) -> None:
        self._kernel = kernel
        self._control = control

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)

    def __call__(
        self, x_TH: torch.Tensor, ids_TK: torch.Tensor, scores_TK: torch.Tensor, layer: int
    ) -> torch.Tensor:
        began = time.monotonic()
        self._count(1)
        out_TH = self._kernel(x_TH, ids_TK, scores_TK, layer)
        experts = len(ids_TK[ids_TK >= 0].unique())
        while (left_s := began + experts * self._seconds() - time.monotonic()) > 0:
            time.sleep(min(left_s, _POLL_S))
        self._count(2)
        return out_TH

    def _seconds(self) -> float:
        return LAYOUT.unpack_from(self._control)[0]

    def _count(self, field: int) -> None:
        (count,) = struct.unpack_from("<q", self._control, 8 * field)
        struct.pack_into("<q", self._control, 8 * field, count + 1)


def _patch(server_id: str) -> None:
    from expert_server import main

    plain: Callable[..., Any] = main.choose_kernel
    control = open_control(Path(os.environ[DIRECTORY]) / server_id)

    def choose(*arguments: Any) -> Any:
        return SimpleNamespace(kernel=FaultyKernel(plain(*arguments).kernel, control))

    main.choose_kernel = choose


def _speak(spoken: str) -> None:
    from eaas import versions

    oldest, newest = map(int, spoken.split("-"))
    versions.CONTROL_PLANE = versions.SLOTS = versions.Versions(oldest, newest)


if __name__ == "__main__":
    if NETWORK in os.environ:
        enter_network(os.environ[NETWORK])
    if sys.argv[1] == "expert-server":
        _patch(sys.argv[sys.argv.index("--id") + 1])
    if SPOKEN in os.environ:
        _speak(os.environ[SPOKEN])
    from eaas_cli.commands import main as program

    program()
