"""The limit of open files (RLIMIT_NOFILE): raise it at the start, check it, name it in errors."""

from __future__ import annotations

import errno
import os
import resource

from eaas.errors import ConfigError

__all__ = ["free_files", "prepare_open_files", "room_for_connections", "shortage_of_files"]

# Files needed to start a role and connect a small cluster.
_LEAST = 128
# Reserved for new members, checkpoints and logs.
_RESERVED = 128
# Enough for all accepted connections. Far higher limits slow down programs that visit all descriptors.
_MOST = 65_536
_REMEDY = "run `ulimit -n 4096` first, or raise LimitNOFILE (systemd) or nofile (containers)"


def prepare_open_files(program: str, least: int = _LEAST) -> None:
    """Raise this process's soft limit of open files as far as its hard limit allows; children inherit it.

    Args:
        program: Name of the program, for the message.
        least: Number of files that it needs.

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
    """Count the files that this process may still open, to limit the connections that it accepts."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MOST
    return max(0, soft - len(os.listdir("/proc/self/fd")))


def room_for_connections() -> int:
    """Number of connections that a server may accept so that some files remain for other uses."""
    free = free_files()
    return max(1, free - min(_RESERVED, free // 4))


def shortage_of_files(error: BaseException) -> str | None:
    """Explain in one line an error caused by too many open files; None for other errors.

    Libraries wrap the operating system's error, or keep only its text.
    """
    found: BaseException | None = error
    while found is not None:
        # ENFILE is first, because its text contains that of EMFILE.
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
