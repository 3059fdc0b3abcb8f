"""Settings `device` and `kernel`: which kernel they mean, and one clear error for what contradicts."""

import pytest
import torch

from eaas.errors import ConfigError
from expert_server.kernels import on_device
from expert_server.kernels.on_device import kernel_on


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs, a build for them, Triton, and no interpreter."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(on_device, "find_spec", lambda _name: object())
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.mark.parametrize(
    ("device", "kernel", "meant"),
    [
        ("cpu", "auto", "auto"),
        ("cpu", "native", "native"),
        ("cpu", "reference", "reference"),
        ("cuda", "auto", "triton"),
        ("cuda", "triton", "triton"),
        ("cuda:1", "auto", "triton"),
    ],
)
def test_auto_is_triton_on_a_gpu(device: str, kernel: str, meant: str) -> None:
    assert kernel_on(device, kernel) == meant


@pytest.mark.parametrize(
    ("device", "kernel", "words"),
    [
        (
            "cuda:1",
            "native",
            "kernel native .*device is cuda:1: give --kernel auto or --device cpu",
        ),
        ("cuda", "reference", "kernel reference .*device is cuda: give --kernel auto"),
        ("cpu", "triton", "kernel triton .*device is cpu: give --device cuda or --kernel auto"),
        ("cuda:7", "auto", "device cuda:7: torch sees 2 GPUs: give cuda:0 to cuda:1"),
    ],
)
def test_a_contradiction_has_a_remedy(device: str, kernel: str, words: str) -> None:
    with pytest.raises(ConfigError, match=f"^expert_server.{words}"):
        kernel_on(device, kernel)


def test_a_missing_gpu_build_or_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match="torch sees 1 GPU: give cuda:0, or check"):
        kernel_on("cuda:1", "auto")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ConfigError, match="device cuda: torch sees no GPU: check `nvidia-smi`"):
        kernel_on("cuda", "auto")
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    with pytest.raises(ConfigError, match=r"device cuda:0: torch .* is a build without CUDA"):
        kernel_on("cuda:0", "triton")
    monkeypatch.setattr(on_device, "find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match=r"pip install 'expert-as-a-service\[triton\]'"):
        kernel_on("cuda", "auto")


def test_the_interpreter_stands_in_for_any_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    assert kernel_on("cpu", "triton") == "triton"
    assert kernel_on("cuda:7", "auto") == "triton"
    with pytest.raises(ConfigError, match="kernel native computes on the CPU"):
        kernel_on("cuda", "native")
