import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from attention_client.connections.process_watch import watch_process

PATIENCE_S = 10.0


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


def pidfds() -> int:
    fds = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return sum("pidfd" in os.readlink(fd) for fd in fds if os.path.islink(fd))


def test_the_end_of_a_process_is_reported_once(sleeper: subprocess.Popen[bytes]) -> None:
    before = pidfds()
    told = threading.Semaphore(0)
    end = watch_process(sleeper.pid, lambda: told.release())
    assert pidfds() == before + 1
    sleeper.kill()
    assert told.acquire(timeout=PATIENCE_S)
    assert pidfds() == before
    end()
    assert not told.acquire(timeout=0.05)


def test_an_ended_watch_is_silent(sleeper: subprocess.Popen[bytes]) -> None:
    before = pidfds()
    told, kept = threading.Event(), threading.Event()
    end = watch_process(sleeper.pid, lambda: told.set())
    watch_process(sleeper.pid, lambda: kept.set())
    end()
    end()
    sleeper.kill()
    assert kept.wait(PATIENCE_S)
    assert not told.is_set()
    assert pidfds() == before


def test_ending_a_watch_spares_another_with_the_same_descriptor(
    sleeper: subprocess.Popen[bytes],
) -> None:
    end = watch_process(sleeper.pid, lambda: None)
    end()
    told = threading.Event()
    watch_process(sleeper.pid, lambda: told.set())  # The lowest free descriptor: the same number.
    end()
    sleeper.kill()
    assert told.wait(PATIENCE_S)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_callback_that_raises_spares_the_others(sleeper: subprocess.Popen[bytes]) -> None:
    told = threading.Event()

    def broken() -> None:
        raise ValueError("a callback's own fault")

    watch_process(sleeper.pid, broken)
    watch_process(sleeper.pid, lambda: told.set())
    sleeper.kill()
    assert told.wait(PATIENCE_S)
    again = threading.Event()
    with subprocess.Popen([sys.executable, "-c", ""]) as other:
        watch_process(other.pid, lambda: again.set())
        assert again.wait(PATIENCE_S)


def test_an_unknown_process_is_an_error() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    with pytest.raises(ProcessLookupError):
        watch_process(process.pid, lambda: None)
