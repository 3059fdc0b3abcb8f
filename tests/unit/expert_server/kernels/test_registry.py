"""Kernels are imported when they are asked for, and say what is missing."""

import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
import torch

from eaas.config import ExpertServerConfig
from expert_server.kernels import ExpertKernel, KernelSpec, Quantization, registry
from expert_server.kernels.kernel import UnsupportedError
from expert_server.kernels.registry import KERNEL_NAMES, create_kernel
from expert_server.weights.weights import ExpertForm

FORMS = [ExpertForm(has_gate=False, is_transposed=False, activate=torch.relu)]
FLOAT32 = KernelSpec(torch.float32)


def test_the_settings_have_these_kernels_and_quantisations() -> None:
    fields = ExpertServerConfig.model_fields
    assert get_args(fields["kernel"].annotation) == ("auto", *KERNEL_NAMES)
    assert get_args(fields["quantization"].annotation) == tuple(map(str, Quantization))


@pytest.mark.parametrize("name", KERNEL_NAMES)
def test_each_name_creates_its_kernel_or_is_unsupported(name: str) -> None:
    try:
        kernel = create_kernel(name, FORMS, FLOAT32)
    except UnsupportedError as error:
        pytest.skip(str(error))
    assert isinstance(kernel, ExpertKernel)
    assert kernel.name == name
    kernel.close()


def test_kernels_are_imported_on_demand() -> None:
    code = """
import sys
from expert_server.kernels import registry
modules = {module for name, (module, _) in registry._CLASSES.items() if name != "reference"}
assert len(modules) == 3
assert not modules & set(sys.modules), modules & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("import a_library_that_nobody_has", "a_library_that_nobody_has"),
        ("raise OSError('undefined symbol: x')", "undefined symbol"),
    ],
)
def test_a_kernel_that_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: str, why: str
) -> None:
    (tmp_path / "broken_kernel.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(registry._CLASSES, "zentorch", ("broken_kernel", "ZentorchKernel"))
    with pytest.raises(UnsupportedError, match=rf"not installed.*{why}.*\[zentorch\]"):
        create_kernel("zentorch", FORMS, FLOAT32)
