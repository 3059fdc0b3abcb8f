"""How the persistent kernel is launched: the driver's calls, on a fake one."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from expert_server.kernels.gpu.launch import Launched, Registered, load_driver
from expert_server.kernels.gpu.persistent import Arguments
from expert_server.kernels.kernel import UnsupportedError


class Driver:
    """Records calls; the call named by `refuses` fails."""

    def __init__(self, refuses: str = "") -> None:
        self.calls: dict[str, tuple[Any, ...]] = {}
        self._refuses = refuses

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.calls[name] = arguments
            if name == "cuGetErrorString":
                arguments[1]._obj.value = b"too many resources"
            if name == "cuModuleGetFunction":
                arguments[0]._obj.value = 77
            return 720 if name == self._refuses else 0

        return call


class Stream:
    """Of torch.cuda; ends after so many queries."""

    cuda_stream = 99

    def __init__(self) -> None:
        self.waited: list[object] = []
        self.left = 3

    def wait_stream(self, other: object) -> None:
        self.waited.append(other)

    def query(self) -> bool:
        self.left -= 1
        return self.left <= 0


class Kernel:
    """Of a persistent kernel what the launch uses."""

    def __init__(self) -> None:
        self.arguments = Arguments(hidden=64)
        self.is_stopped = False

    def stop(self) -> None:
        self.is_stopped = True


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    made = Stream()
    properties = SimpleNamespace(multi_processor_count=132)
    for name, fake in {
        "Stream": lambda: made,
        "current_stream": lambda: "current",
        "current_device": lambda: 0,
        "get_device_properties": lambda _device: properties,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return made


def test_a_block_for_each_processor_is_launched_with_the_arguments(stream: Stream) -> None:
    driver, kernel = Driver(), Kernel()
    launched = Launched(driver, b"program", kernel)  # type: ignore[arg-type]
    assert driver.calls["cuModuleLoadData"][1] == b"program"
    assert driver.calls["cuModuleGetFunction"][2] == b"serve"
    assert stream.waited == ["current"]
    function, *sizes, on, parameters = driver.calls["cuLaunchCooperativeKernel"]
    assert (function.value, on.value) == (77, 99)
    assert sizes == [132, 1, 1, 256, 1, 1, 0]
    assert Arguments.from_address(parameters[0]).hidden == 64
    launched.close(1.0)
    assert kernel.is_stopped
    assert stream.left == 0


def test_a_kernel_that_does_not_end_is_named(stream: Stream) -> None:
    launched = Launched(Driver(), b"program", Kernel())  # type: ignore[arg-type]
    stream.left = 10**9
    with pytest.raises(TimeoutError, match="did not end in 0 s"):
        launched.close(0)


@pytest.mark.usefixtures("stream")
@pytest.mark.parametrize(
    "call", ["cuModuleLoadData", "cuModuleGetFunction", "cuLaunchCooperativeKernel"]
)
def test_the_drivers_words_are_shown(call: str) -> None:
    with pytest.raises(UnsupportedError, match=r"refuses: too many resources \(720\)"):
        Launched(Driver(call), b"program", Kernel())  # type: ignore[arg-type]


def test_memory_is_registered_at_the_hosts_address() -> None:
    driver = Driver()
    registered = Registered(driver, 4096, 100)
    address, nbytes, flags = driver.calls["cuMemHostRegister_v2"]
    assert (address.value, nbytes.value, flags) == (4096, 100, 3)
    registered.close()
    assert driver.calls["cuMemHostUnregister"][0].value == 4096
    with pytest.raises(UnsupportedError, match="too many resources"):
        Registered(Driver("cuMemHostRegister_v2"), 4096, 100)


def test_without_a_driver_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_name: str) -> Any:
        raise OSError("libcuda.so.1: cannot open")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(UnsupportedError, match="driver is missing: libcuda"):
        load_driver()
