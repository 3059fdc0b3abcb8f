"""Row 29 of the fault contract: other users cannot use an arena."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import eaas
from eaas.errors import SharedMemoryError
from eaas.wire import Arena
from eaas.wire.arena import SHM_DIRECTORY

ROOT = Path(eaas.__file__).parents[1]
NOBODY = 65_534

# Attaches as another user; imports come first, since that one may not read them.
STRANGER = """
import os, sys
from eaas.errors import SharedMemoryError
from eaas.wire import Arena

pid, fd, size, user = map(int, sys.argv[1:])
os.setgroups([])
os.setresgid(user, user, user)
os.setresuid(user, user, user)
try:
    Arena.attach(pid, fd, size)
except SharedMemoryError as error:
    print(error)
    sys.exit(7)
"""


@pytest.fixture
def shared() -> Iterator[Arena]:
    arena = Arena.create_shared(3, 1000, 500, 1)
    yield arena
    arena.close()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
@pytest.mark.parametrize("user", [NOBODY, 0])
def test_row_29_another_user_is_refused(shared: Arena, user: int) -> None:
    """Row 29: another user attaches to a segment: refused. (Its own user is not.)"""
    assert stat.S_IMODE(os.fstat(shared.fd).st_mode) == 0o600
    arguments = (os.getpid(), shared.fd, shared.size, user)
    done = subprocess.run(
        [sys.executable, "-c", STRANGER, *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if user == os.getuid():
        assert (done.returncode, done.stdout) == (0, ""), done.stderr
    else:
        assert done.returncode == 7, done.stderr
        assert "cannot be attached: Permission denied" in done.stdout


def test_row_29_there_is_no_name_to_plant_a_symlink_at() -> None:
    """Row 29: a planted symlink: refused. An arena is made without a name, so nothing that somebody puts
    into /dev/shm is ever opened or followed.
    """
    names = set(os.listdir(SHM_DIRECTORY))
    arena = Arena.create_shared(3, 1000, 500, 1)
    try:
        assert set(os.listdir(SHM_DIRECTORY)) == names
        # (Nor can it get one later: `test_the_file_cannot_get_a_name`.)
        assert os.fstat(arena.fd).st_nlink == 0
    finally:
        arena.close()


@pytest.mark.parametrize("follow", [True, False])
def test_row_29_a_descriptor_that_leads_elsewhere_is_refused(
    tmp_path: Path, shared: Arena, follow: bool
) -> None:
    """Row 29: a planted symlink: refused, also where the descriptor that a client is sent to leads
    through one to a file of the client's own, of the right size and mode.
    """
    target, link = tmp_path / "target", tmp_path / "link"
    precious = os.urandom(shared.size)
    target.write_bytes(precious)
    target.chmod(0o600)
    link.symlink_to(target)
    fd = os.open(link, os.O_RDWR if follow else os.O_PATH | os.O_NOFOLLOW)
    try:
        with pytest.raises(SharedMemoryError, match=f"/proc/{os.getpid()}/fd/{fd}"):
            Arena.attach(os.getpid(), fd, shared.size)
    finally:
        os.close(fd)
    assert target.read_bytes() == precious
