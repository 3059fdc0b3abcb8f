"""The plan of `eaas bench experts`, from its command line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eaas.checkpoint.formats import USUAL, StoredFormat
from eaas.checkpoint.quantized import INT4
from eaas.cores import usable_cores
from eaas.errors import ConfigError
from eaas_cli.bench.command import DEVICES
from eaas_cli.option_values import known, numbers, once

__all__ = [
    "BUILT_IN",
    "DTYPES",
    "FORMATS",
    "Plan",
    "Shape",
    "compute_dtype",
    "make_plan",
    "parse_shape",
]

FORMATS = USUAL | {"int4-g32": StoredFormat(INT4, 32, has_short_scales=True)}
"""Quantised weights."""
DTYPES = ("bfloat16", "float32", *FORMATS)


@dataclass(frozen=True)
class Shape:
    """The experts of one MoE layer: gate and up (2I, H), down (H, I).

    Attributes:
        hidden: H.
        intermediate: I.
        num_experts: E.
        top_k: K.
    """

    hidden: int
    intermediate: int
    num_experts: int
    top_k: int

    def __str__(self) -> str:
        return f"{self.hidden},{self.intermediate},{self.num_experts},{self.top_k}"

    @property
    def expert_size(self) -> int:
        """Number of weights of one expert: gate, up and down."""
        return 3 * self.hidden * self.intermediate


BUILT_IN = (Shape(2048, 768, 128, 8), Shape(7168, 2048, 16, 8))


@dataclass(frozen=True)
class Plan:
    """Shapes, dtypes, kernels and batch sizes that a run measures.

    Attributes:
        shapes: Shapes in the order of measurement.
        dtypes: Dtypes of the stored weights, some of DTYPES.
        kernels: Names of the registry; empty: all that work here.
        rounds: Calls of each implementation in each cell.
        threads: Intra-op threads of every implementation.
        device: One of DEVICES.
        tune: Whether to measure and keep the device's tiles first.
    """

    shapes: tuple[Shape, ...]
    tokens: tuple[int, ...]
    dtypes: tuple[str, ...]
    kernels: tuple[str, ...]
    rounds: int
    threads: int
    device: str = "cpu"
    tune: bool = False


def compute_dtype(dtype: str) -> str:
    """Dtype of a product's inputs. Quantised weights are multiplied with bfloat16 activations."""
    return "float32" if dtype == "float32" else "bfloat16"


def make_plan(
    *,
    shapes: Sequence[str] = (),
    tokens: str | None = None,
    dtypes: Sequence[str] = (),
    kernels: Sequence[str] = (),
    rounds: int | None = None,
    threads: int | None = None,
    device: str = "cpu",
    tune: bool = False,
) -> Plan:
    """Check the options of `eaas bench experts` and make a plan. Raises ConfigError."""
    # Imported here: who needs a shape alone needs no torch.
    from expert_server.kernels.choose import KERNELS, ON_REQUEST
    from expert_server.kernels.gpu.packing import STORED

    known("--device", [device], DEVICES)
    on_gpu = device == "cuda"
    usual = ("bfloat16", *map(str, STORED)) if on_gpu else DTYPES
    if tune and not on_gpu:
        raise ConfigError("--tune measures a GPU's tiles: add --device cuda")
    if tokens is None:
        tokens = f"1,8,64,512,{4096 if on_gpu else 2048}"
    return Plan(
        shapes=once([parse_shape(text) for text in shapes]) or BUILT_IN,
        tokens=tuple(sorted(set(numbers("--tokens", tokens)))),
        dtypes=known("--dtype", dtypes or usual, DTYPES),
        kernels=known("--kernel", kernels, tuple(ON_REQUEST if on_gpu else KERNELS)),
        rounds=rounds or (20 if on_gpu else 5),
        threads=threads or usable_cores(),
        device=device,
        tune=tune,
    )


def parse_shape(text: str) -> Shape:
    """Read a shape `H,I,E,K` of the option --shape. Raises ConfigError."""
    sizes = numbers("--shape", text)
    if len(sizes) != 4:
        raise ConfigError(f"--shape {text}: give four numbers H,I,E,K, such as {BUILT_IN[0]}")
    hidden, intermediate, num_experts, top_k = sizes
    shape = Shape(hidden, intermediate, num_experts, top_k)
    if shape.top_k > shape.num_experts:
        raise ConfigError(
            f"--shape {text}: a token cannot go to {shape.top_k} of {shape.num_experts} experts: "
            "give K of at most E"
        )
    return shape
