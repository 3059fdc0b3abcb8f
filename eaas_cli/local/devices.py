"""In the launcher: the GPUs of `eaas up --devices`, one expert server on each. Imports no torch."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Sequence

from eaas.config import ClusterConfig
from eaas.config.settings import GPU_NUMBER
from eaas.counted import counted
from eaas.errors import ConfigError

__all__ = ["count_gpus", "parse_devices", "refuse_shared_device", "server_count"]

_SERVERS = 3
_GPU = re.compile(f"cuda:{GPU_NUMBER}")
# In a process of its own: the launcher stays without torch, and forks no process of an initialised GPU.
_COUNT = "import torch; print(torch.cuda.device_count())"
_COUNT_S = 120.0


def count_gpus() -> int:
    """Count the GPUs that torch sees; takes the seconds of an import of torch.

    Raises:
        ConfigError: They cannot be counted.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-c", _COUNT], capture_output=True, text=True, timeout=_COUNT_S
        )
        return int(done.stdout)
    except (subprocess.TimeoutExpired, ValueError) as error:
        raise ConfigError(
            "--devices all: torch cannot count the GPUs; name them: --devices cuda:0,cuda:1"
        ) from error


def parse_devices(text: str, count: Callable[[], int] = count_gpus) -> tuple[str, ...]:
    """Read `--devices`: "cuda:0,cuda:1", or "all" that `count` finds. The servers check that they exist.

    Raises:
        ConfigError: It is neither, names a device twice, or there is none.
    """
    if text == "all":
        devices = tuple(f"cuda:{number}" for number in range(count()))
        if not devices:
            raise ConfigError(
                "--devices all: torch sees no GPU: check `nvidia-smi`, CUDA_VISIBLE_DEVICES, and that torch "
                "is a build with CUDA, or leave --devices out"
            )
        return devices
    devices = tuple(word.strip() for word in text.split(","))
    for device in devices:
        if _GPU.fullmatch(device) is None:
            raise ConfigError(f"--devices {text}: {device!r} is no GPU: give cuda:0,cuda:1 or all")
        if devices.count(device) > 1:
            raise ConfigError(f"--devices {text}: one server computes on a GPU: name {device} once")
    return devices


def server_count(servers: int | None, devices: Sequence[str]) -> int:
    """Return the number of servers that `--servers` and `--devices` ask for; three without either.

    Raises:
        ConfigError: They differ.
    """
    if not devices:
        return _SERVERS if servers is None else servers
    if servers not in (None, len(devices)):
        raise ConfigError(
            f"--servers {servers}: --devices names {counted(len(devices), 'GPU')}, and each has one server: "
            "leave --servers out"
        )
    return len(devices)


def refuse_shared_device(config: ClusterConfig, servers: int, devices: Sequence[str]) -> None:
    """Raise ConfigError if the settings, and no list of devices, put several servers on one GPU."""
    device = config.expert_server.device
    if device != "cpu" and servers > 1 and not devices:
        raise ConfigError(
            f"expert_server.device {device}: all servers of this machine would share it: give `eaas up "
            "--devices cuda:0,cuda:1`, or --devices all"
        )
