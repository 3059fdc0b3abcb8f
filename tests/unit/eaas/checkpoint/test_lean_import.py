"""A process of this project imports transformers without what models do not run; all of it can come later."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from helper_process import output_of

_DEMO = Path(__file__).parents[4] / "examples/demo"
_PROGRAM = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from eaas.checkpoint import Checkpoint
from eaas.checkpoint.lean_import import import_transformers, without_compiler
import_transformers()
assert Checkpoint.open(Path(sys.argv[2])).shape.layer_names
unused = "torch._dynamo", "torch._inductor", "torch.distributed.tensor", "scipy"
for name in *unused, "torchvision", "sklearn", "timm":
    assert name not in sys.modules, name
import torchvision
assert torchvision.installed
del sys.path[0], sys.modules["torchvision"]

# Later imports find everything. A package that uses the compiler gets the real one, also while decorators
# of models find a stand-in.
with without_compiler():
    from torch._dynamo.utils import is_compile_supported
import scipy.optimize, torch, torch._dynamo, transformers
assert torch._dynamo.utils.is_compile_supported is is_compile_supported
assert sys.modules["torch._dynamo"] is torch._dynamo
assert torch._dynamo.utils.__spec__.origin == torch._dynamo.utils.__file__
from transformers.models import Qwen3Config, bert
assert torch.distributed.is_available()
assert transformers.models.bert is bert
assert torch._dynamo.config and torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)) == 2
"""


@pytest.mark.timeout(240)
def test_a_checkpoint_opens_without_what_no_model_needs_which_can_come_later(
    tmp_path: Path,
) -> None:
    """Optional packages may be installed in the same environment, and need not fit."""
    for name in ("torchvision", "sklearn", "timm"):
        (tmp_path / f"{name}.py").write_text("installed = True")
    output_of(sys.executable, "-c", _PROGRAM, tmp_path, _DEMO, timeout_s=200)
