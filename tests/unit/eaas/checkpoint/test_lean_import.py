"""A process of this project imports transformers without torch's compiler; all of either can come later."""

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


def run(code: str) -> None:
    subprocess.run([sys.executable, "-c", _LEAN + code], check=True, timeout=100)


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
