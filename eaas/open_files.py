"""The process's limit of open files (RLIMIT_NOFILE): raised at the start, checked, and named in errors."""

from __future__ import annotations

import errno
import os
import resource

from eaas.errors import ConfigError

__all__ = ["free_files", "prepare_open_files", "room_for_connections", "shortage_of_files"]

# What a role opens at its start, and room for the connections of a small cluster.
_LEAST = 128
# Members that join, checkpoints and logs.
_RESERVED = 128
# Enough for every connection that we accept. Far above, programs that go through all descriptors crawl.
_MOST = 65_536
_REMEDY = "run `ulimit -n 4096` first, or raise LimitNOFILE (systemd) or nofile (containers)"


def prepare_open_files(program: str, least: int = _LEAST) -> None:
    """Raise this process's soft limit as far as its hard limit allows; children inherit it.

    Args:
        program: Its name, for the message.
        least: Files that it needs.

    Raises:
        ConfigError: The limit stays below `least`.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST if hard == resource.RLIM_INFINITY else min(_MOST, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    if soft != resource.RLIM_INFINITY and soft < least:
        raise ConfigError(
            f"the limit of open files is {soft} and {program} needs {least}: {_REMEDY}"
        )


def free_files() -> int:
    """Files that this process may still open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MOST
    return max(0, soft - len(os.listdir("/proc/self/fd")))


def room_for_connections() -> int:
    """Connections that a server of this process may accept, so that other files can be opened still."""
    free = free_files()
    return max(1, free - min(_RESERVED, free // 4))


def shortage_of_files(error: BaseException) -> str | None:
    """One line that names the limit, if an error comes from too many open files; else None.

    Libraries wrap the operating system's error, and those in Rust and C++ leave only its text.
    """
    found: BaseException | None = error
    while found is not None:
        # In this order: the text of the second is a part of the first's.
        for code, advice in ((errno.ENFILE, _whole_machine), (errno.EMFILE, _this_process)):
            same = isinstance(found, OSError) and found.errno == code
            if same or os.strerror(code) in str(found):
                return advice()
        found = found.__cause__ or found.__context__
    return None


def _this_process() -> str:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return f"too many open files, the limit is {soft}: {_REMEDY}"


def _whole_machine() -> str:
    return "too many open files on this machine: raise the sysctl fs.file-max"
