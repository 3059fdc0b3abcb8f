"""Compiled extensions with emulated AMX tiles (amx_emulation.h), for CPUs that have AVX-512 only."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import subprocess
import sysconfig
from functools import cache
from pathlib import Path
from types import ModuleType

__all__ = ["build", "missing"]

_HERE = Path(__file__).parent
_ROOT = _HERE.parents[1]
# What the emulation and the code around the tiles need; each CPU with AMX has it.
_NEEDED = ("avx512f", "avx512bw", "avx512_vnni", "avx512vbmi")
_CLIENT = ("eaas/threads/pool.c", "attention_client/exchange/tensors.c")
_SOURCES = {
    "expert_server/kernels/native": ("eaas/threads/pool.c",),
    "attention_client/engines/transformers/dense": _CLIENT,
    "attention_client/engines/transformers/paged": _CLIENT,
}


@cache
def missing(*more: str) -> str:
    """Name what this machine lacks to run the emulation, and of `more`; empty if nothing."""
    cpu = Path("/proc/cpuinfo").read_text()
    flags = next((line.split() for line in cpu.splitlines() if line.startswith("flags")), [])
    return " ".join(name for name in (*_NEEDED, *more) if name not in flags)


def build(folder: Path, sources: str, name: str) -> ModuleType:
    """Compile an extension into a folder, load it beside the installed one, and return it.

    Args:
        folder: Where its file is.
        sources: Directory of its C code, which uses tiles.
        name: Of the module.

    Raises:
        subprocess.CalledProcessError: The compiler failed.
    """
    module = folder / f"{name}.so"
    compiler = (sysconfig.get_config_var("CC") or "cc").split()
    files = [*(_ROOT / sources).glob("*.c"), *(_ROOT / other for other in _SOURCES[sources])]
    command = [
        *(*compiler, "-O1", "-std=gnu11", "-shared", "-fPIC", "-pthread", "-fvisibility=hidden"),
        *("-Wno-psabi", "-Wl,-Bsymbolic", f"-I{sysconfig.get_path('include')}"),
        f'-DAMX_EMULATION="{_HERE / "amx_emulation.h"}"',
        *("-o", str(module), *map(str, files), "-lm"),
    ]
    subprocess.run(command, check=True, timeout=500)
    # The last part of its name decides which function initialises it.
    loader = importlib.machinery.ExtensionFileLoader(f"emulated.{name}", str(module))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    loaded = importlib.util.module_from_spec(spec)
    loader.exec_module(loaded)
    return loaded
