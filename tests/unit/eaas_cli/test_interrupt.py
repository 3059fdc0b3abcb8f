"""Signals that end a launcher's waits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from eaas_cli.local.interrupt import Interrupt, Interrupted
from eaas_cli.local.process import ChildProcess, stop_all, wait_ready

SILENT = "import time; time.sleep(600)"
ENDS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
NUMBERS = [*ENDS, signal.SIGUSR1]
# A command that takes long to exit, as one with torch loaded does.
ENDING = """
import atexit, time
from eaas_cli.local.interrupt import Interrupt, Interrupted

class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(0.3)

slow = Slow()
atexit.register(time.sleep, 0.3)
try:
    with Interrupt() as interrupt:
        print("waits", flush=True)
        interrupt.wait(60)
except Interrupted:
    print("ends", flush=True)
"""


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in NUMBERS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", ENDS)
def test_a_signal_ends_every_wait_from_then_on(number: signal.Signals) -> None:
    with Interrupt() as interrupt:
        interrupt.wait(0.01)
        timer = threading.Timer(0.1, os.kill, (os.getpid(), number))
        timer.start()
        with pytest.raises(Interrupted) as caught:
            interrupt.wait(60)
        assert caught.value.code == 128 + number
        timer.join()
        for _ in range(2):
            with pytest.raises(Interrupted):
                interrupt.wait(60)
            with pytest.raises(Interrupted):
                interrupt.check()


@pytest.mark.parametrize("number", ENDS)
def test_further_signals_change_nothing_until_the_process_has_ended(
    number: signal.Signals,
) -> None:
    with subprocess.Popen([sys.executable, "-c", ENDING], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"waits\n"
        process.send_signal(number)
        assert process.stdout.readline() == b"ends\n"
        while process.poll() is None:
            process.send_signal(number)
            time.sleep(0.01)
    assert process.returncode == 0


def test_a_signal_at_any_moment_is_not_missed() -> None:
    for _ in range(200):
        with Interrupt() as interrupt:
            killer = threading.Thread(target=os.kill, args=(os.getpid(), signal.SIGHUP))
            killer.start()
            with pytest.raises(Interrupted):
                interrupt.wait(60)
            killer.join()


def test_a_thousand_signals_are_one() -> None:
    with Interrupt() as interrupt:
        for _ in range(1000):
            os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(Interrupted):
            interrupt.check()


def test_other_signals_do_not_shorten_a_wait_and_the_handlers_return() -> None:
    signal.signal(signal.SIGUSR1, lambda *_: None)
    before = {number: signal.getsignal(number) for number in NUMBERS}
    with Interrupt() as interrupt:
        os.kill(os.getpid(), signal.SIGUSR1)
        started = time.monotonic()
        interrupt.wait(0.2)
        assert time.monotonic() - started >= 0.2
    assert {number: signal.getsignal(number) for number in NUMBERS} == before


@pytest.mark.parametrize("moment_s", [0.0, 0.3])
def test_a_signal_ends_the_wait_for_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment_s: float
) -> None:
    (tmp_path / "silent.py").write_text(SILENT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with Interrupt() as interrupt:
        child = ChildProcess("silent", (), None, module="silent")
        try:
            timer = threading.Timer(moment_s, os.kill, (os.getpid(), signal.SIGTERM))
            timer.start()
            with pytest.raises(Interrupted):
                wait_ready([child], 60, interrupt)
            timer.join()
        finally:
            stop_all([child])
