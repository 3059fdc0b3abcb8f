"""A fake root directory with control groups, and what /proc says of them."""

from __future__ import annotations

from pathlib import Path

__all__ = ["CgroupTree"]

_V2 = "cgroup2"


class CgroupTree:
    """Control groups as a process sees them.

    Args:
        root: The fake root.
        free: Bytes of the machine that are available.
    """

    def __init__(self, root: Path, free: int = 64 << 30) -> None:
        self.root = root
        self._proc = root / "proc" / "self"
        self._proc.mkdir(parents=True)
        (root / "proc" / "meminfo").write_text(f"MemAvailable: {free >> 10} kB\n")
        self._mounts: list[str] = ["22 27 0:21 / /proc rw,relatime shared:5 - proc proc rw"]
        self._own: list[str] = []

    def own(self, group: str, controllers: str = "", number: int = 0) -> None:
        """Put the process into a group: of version 2, or of the hierarchy with these controllers."""
        self._own.append(f"{number}:{controllers}:{group}")
        (self._proc / "cgroup").write_text("\n".join(self._own) + "\n")

    def mount(self, at: str, controllers: str = "", top: str = "/") -> None:
        """Mount a hierarchy at a directory, from a topmost group on."""
        kind = "cgroup" if controllers else _V2
        where = at.replace(" ", r"\040")
        options = ",".join(filter(None, ("rw", controllers)))
        self._mounts.append(
            f"31 23 0:28 {top} {where} rw,nosuid shared:9 - {kind} {kind} {options}"
        )
        (self._proc / "mountinfo").write_text("\n".join(self._mounts) + "\n")
        (self.root / at.lstrip("/")).mkdir(parents=True, exist_ok=True)

    def write(self, directory: str, **files: str | int) -> None:
        """Write a group's files, by names with `__` for the point."""
        group = self.root / directory.lstrip("/")
        group.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (group / name.replace("__", ".")).write_text(f"{text}\n")
