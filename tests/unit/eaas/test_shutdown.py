"""Signals and requests that end a process."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from eaas.shutdown import Shutdown


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_wait(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with Shutdown() as shutdown:
        timer = threading.Timer(0.1, os.kill, (os.getpid(), number))
        timer.start()
        assert shutdown.wait() == number.name
        timer.join()
    assert signal.getsignal(number) is before


def test_signals_before_the_wait_count() -> None:
    with Shutdown() as shutdown:
        os.kill(os.getpid(), signal.SIGTERM)
        assert shutdown.wait() == "SIGTERM"
    with Shutdown() as shutdown:
        shutdown.request("enough")
        assert shutdown.wait() == "enough"


def test_no_signal_is_missed() -> None:
    for _ in range(200):
        with Shutdown() as shutdown:
            killer = threading.Thread(target=os.kill, args=(os.getpid(), signal.SIGTERM))
            killer.start()
            assert shutdown.wait() == "SIGTERM"
            killer.join()


def test_other_signals_do_not_end_it() -> None:
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    with Shutdown() as shutdown:
        os.kill(os.getpid(), signal.SIGUSR1)
        shutdown.request("the end")
        assert shutdown.wait() == "the end"
    signal.signal(signal.SIGUSR1, before)
