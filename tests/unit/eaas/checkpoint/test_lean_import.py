"""A process of this project imports transformers without what models do not run; all of it can come later."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_DEMO = Path(__file__).parents[4] / "examples/demo"
_LEAN = """
import sys
from pathlib import Path
from eaas.checkpoint import Checkpoint
from eaas.checkpoint.lean_import import import_transformers
import_transformers()
"""


def run(code: str, before: str = _LEAN) -> None:
    subprocess.run([sys.executable, "-c", before + code], check=True, timeout=100)


def test_a_checkpoint_opens_without_compiler_distributed_tensors_and_scipy() -> None:
    run(f"""
assert Checkpoint.open(Path({str(_DEMO)!r})).shape.layer_names
for name in "torch._dynamo", "torch._inductor", "torch.distributed.tensor", "scipy":
    assert name not in sys.modules, name
""")


def test_later_imports_find_everything() -> None:
    run("""
import scipy.optimize, torch, torch._dynamo, transformers
from transformers.models import Qwen3Config, bert
assert torch.distributed.is_available()
assert transformers.models.bert is bert
assert torch._dynamo.config and torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)) == 2
""")


def test_optional_packages_are_not_imported(tmp_path: Path) -> None:
    """Others may be installed in the same environment, and need not fit."""
    for name in ("torchvision", "sklearn", "timm"):
        (tmp_path / f"{name}.py").write_text("installed = True")
    code = f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\n{_LEAN}"
    run(
        """
for name in "torchvision", "sklearn", "timm":
    assert name not in sys.modules, name
import torchvision
assert torchvision.installed
""",
        code,
    )


def test_a_package_that_uses_the_compiler_gets_the_real_one() -> None:
    """Also while decorators of models find a stand-in."""
    run("""
from eaas.checkpoint.lean_import import without_compiler
with without_compiler():
    from torch._dynamo.utils import is_compile_supported
import torch
assert torch._dynamo.utils.is_compile_supported is is_compile_supported
assert sys.modules["torch._dynamo"] is torch._dynamo
assert torch._dynamo.utils.__spec__.origin == torch._dynamo.utils.__file__
""")
