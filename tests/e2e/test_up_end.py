"""The end of `eaas up`, by each signal: no process, file or port is left."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


# Each signal at each moment. A busy cluster ends by SIGTERM in test_up.py; idle ones by SIGINT in
# test_up_secured.py, by SIGHUP in test_up_control_plane.py.
@pytest.mark.parametrize(
    ("name", "moment"),
    [
        pytest.param("SIGINT", "busy", marks=pytest.mark.nightly),
        pytest.param("SIGTERM", "idle", marks=pytest.mark.nightly),
        pytest.param("SIGHUP", "busy", marks=pytest.mark.nightly),
        pytest.param("SIGKILL", "idle", marks=pytest.mark.nightly),
        ("SIGKILL", "busy"),
    ],
)
def test_nothing_is_left(
    shell_model: Path, start_up: Callable[..., Any], eager_text: str, name: str, moment: str
) -> None:
    up = start_up(shell_model, "--servers", "1", "--redundancy", "1")
    up.wait_serving()
    endpoint = up.endpoint
    number = signal.Signals[name]

    def strike() -> None:
        if number is signal.SIGKILL:
            up.process.kill()
        else:
            up.signal(number)
            # A second signal changes nothing.
            threading.Timer(0.3, os.killpg, (up.process.pid, number)).start()

    if moment == "idle":
        strike()
    else:
        # The answer may be cut off by an error, never without one.
        with contextlib.suppress(httpx.HTTPError, openai.APIError):
            assert up.stream(after=5, then=strike) == eager_text
    code = up.process.wait(10)
    up.home.assert_nothing_left()
    assert is_free(int(endpoint.rpartition(":")[2]))
    assert code == (-signal.SIGKILL if number is signal.SIGKILL else 0)
    assert "Traceback" not in up.output


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in (1, 2))]
)
@pytest.mark.parametrize(
    "name", ["SIGINT", pytest.param("SIGTERM", marks=pytest.mark.nightly), "SIGKILL"]
)
def test_nothing_is_left_of_an_interrupted_start(
    shell_model: Path, start_up: Callable[..., Any], name: str, seed: int
) -> None:
    up = start_up(shell_model, "--servers", "1", "--redundancy", "1")
    up.wait_output("(starting)")
    time.sleep(random.Random(f"{name} {seed}").uniform(0, 6))
    if name == "SIGKILL":
        up.process.kill()
    else:
        up.signal(signal.Signals[name])
    code = up.process.wait(10)
    up.home.assert_nothing_left()
    assert "Traceback" not in up.output
    number = signal.Signals[name]
    # 0 if it served already.
    interrupted = -number if name == "SIGKILL" else 0 if "SERVING" in up.output else 128 + number
    assert code == interrupted
