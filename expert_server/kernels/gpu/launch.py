"""Starts the persistent kernel on a GPU, through the driver's library. Never run on a GPU.

While it runs, nothing may wait for the whole device, which it occupies: no cudaMalloc or cudaFree, and no
first use of another kernel. So allocate and load before.
"""

from __future__ import annotations

import ctypes
import time
from typing import Any

import torch

from expert_server.kernels.gpu.persistent import PersistentKernel
from expert_server.kernels.kernel import UnsupportedError

__all__ = ["Launched", "Registered", "load_driver"]

# As in persistent.cu.
_THREADS = 256
# CU_MEMHOSTREGISTER_PORTABLE and _DEVICEMAP.
_MAPPED = 3
_POLL_S = 1e-3


def load_driver() -> Any:
    """Load NVIDIA's driver. Raises UnsupportedError: it is missing."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise UnsupportedError(f"NVIDIA's driver is missing: {error}") from error


class Registered:
    """Host memory that the device can use at the host's address, until `close`.

    Raises:
        UnsupportedError: The driver refuses.
    """

    def __init__(self, driver: Any, address: int, nbytes: int) -> None:
        self._driver, self._address = driver, ctypes.c_void_p(address)
        _check(driver, driver.cuMemHostRegister_v2(self._address, ctypes.c_size_t(nbytes), _MAPPED))

    def close(self) -> None:
        """Return the memory to the host alone; the device must not use it any more."""
        _check(self._driver, self._driver.cuMemHostUnregister(self._address))


class Launched:
    """A persistent kernel that runs on the current GPU, with one block on each of its processors.

    Args:
        driver: From `load_driver`.
        program: From `nvrtc.persistent_program`, for this GPU.
        kernel: Its arena is registered. It is used until `close` returns.

    Raises:
        UnsupportedError: The driver refuses.
    """

    def __init__(self, driver: Any, program: bytes, kernel: PersistentKernel) -> None:
        self._kernel = kernel
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        _check(driver, driver.cuModuleLoadData(ctypes.byref(module), program))
        _check(driver, driver.cuModuleGetFunction(ctypes.byref(function), module, b"serve"))
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        # What was allocated and loaded is there before it starts.
        self._stream.wait_stream(torch.cuda.current_stream())
        blocks = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(kernel.arguments))
        # Cooperative: the driver refuses if not all blocks fit at once.
        _check(
            driver,
            driver.cuLaunchCooperativeKernel(
                *(function, blocks, 1, 1, _THREADS, 1, 1, 0),
                *(ctypes.c_void_p(self._stream.cuda_stream), arguments),
            ),
        )

    def close(self, timeout_s: float) -> None:
        """Stop it, and wait for its end. Raises TimeoutError: it does not end."""
        self._kernel.stop()
        deadline = time.monotonic() + timeout_s
        while not self._stream.query():
            if time.monotonic() > deadline:
                raise TimeoutError(f"the persistent kernel did not end in {timeout_s} s")
            time.sleep(_POLL_S)


def _check(driver: Any, result: int) -> None:
    if result != 0:
        words = ctypes.c_char_p()
        driver.cuGetErrorString(result, ctypes.byref(words))
        raise UnsupportedError(
            f"the driver refuses: {(words.value or b'error').decode()} ({result})"
        )
