"""Compiles CUDA C for a GPU without CUDA's toolkit: by NVRTC, a library of torch's builds for CUDA.

Without such a build, the package `nvidia-cuda-nvrtc-cu12` has it.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Mapping
from pathlib import Path

from expert_server.kernels.kernel import UnsupportedError

__all__ = ["compile_text", "find_nvrtc", "persistent_program"]

_HERE = Path(__file__).parent
# Headers that persistent.cu includes. NVRTC has no stdint.h; the types are in lanes.h.
_HEADERS = {
    **{name: _HERE / name for name in ("lanes.h", "numbers.h", "poll.h")},
    "headers.h": _HERE.parents[2] / "eaas/wire/headers.h",
}
_OPTIONS = ("--std=c++17", "-D__BYTE_ORDER__=1234", "-D__ORDER_LITTLE_ENDIAN__=1234")


def find_nvrtc() -> ctypes.CDLL:
    """Load NVRTC, from one of NVIDIA's packages or the system.

    Raises:
        UnsupportedError: It is missing.
    """
    places: list[str] = []
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or () if spec is not None else ():
        # Not builtins and alternative builds, which are beside it.
        places += map(str, sorted(Path(folder).glob("**/lib/libnvrtc.so.[0-9]*")))
    for place in (*places, "libnvrtc.so"):
        try:
            return ctypes.CDLL(place)
        except OSError:
            continue
    raise UnsupportedError(
        "NVRTC is missing: install a build of torch with CUDA, or nvidia-cuda-nvrtc-cu12"
    )


def compile_text(
    nvrtc: ctypes.CDLL, text: str, name: str, headers: Mapping[str, str], architecture: str
) -> bytes:
    """Compile a program; return what the driver loads (CUBIN).

    Args:
        name: Of the text, in messages.
        headers: Texts by the names that the program includes.
        architecture: Such as sm_90.

    Raises:
        UnsupportedError: It does not compile; has the compiler's message.
    """
    program = ctypes.c_void_p()
    strings = ctypes.c_char_p * len(headers)
    _check(
        nvrtc,
        nvrtc.nvrtcCreateProgram(
            ctypes.byref(program),
            text.encode(),
            name.encode(),
            len(headers),
            strings(*(each.encode() for each in headers.values())),
            strings(*(each.encode() for each in headers)),
        ),
    )
    try:
        options = (f"--gpu-architecture={architecture}", *_OPTIONS)
        pointers = (ctypes.c_char_p * len(options))(*(each.encode() for each in options))
        if nvrtc.nvrtcCompileProgram(program, len(options), pointers) != 0:
            log = _read(nvrtc, program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
            raise UnsupportedError(f"{name} does not compile for {architecture}: {log.strip()}")
        return _read(nvrtc, program, "CUBIN")
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def persistent_program(nvrtc: ctypes.CDLL, architecture: str) -> bytes:
    """Compile persistent.cu. Raises UnsupportedError as `compile_text`."""
    texts = {"stdint.h": ""} | {name: path.read_text() for name, path in _HEADERS.items()}
    text = (_HERE / "persistent.cu").read_text()
    return compile_text(nvrtc, text, "persistent.cu", texts, architecture)


def _read(nvrtc: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    _check(nvrtc, getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    memory = ctypes.create_string_buffer(size.value)
    _check(nvrtc, getattr(nvrtc, f"nvrtcGet{what}")(program, memory))
    return memory.raw


def _check(nvrtc: ctypes.CDLL, result: int) -> None:
    if result != 0:
        nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise UnsupportedError(f"NVRTC: {nvrtc.nvrtcGetErrorString(result).decode()}")
