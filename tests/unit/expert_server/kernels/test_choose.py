"""The choice of the kernel: the compiled one, never a wrong one."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from eaas.checkpoint import Checkpoint
from eaas.checkpoint.quantized import QuantizedMatrix
from eaas.config import ExpertServerConfig
from eaas.errors import ConfigError
from expert_layers import FORMATS
from expert_server.kernels import KernelSpec, Quantization, ReferenceKernel, StoredFormat, choose
from expert_server.kernels.choose import KERNELS, ON_REQUEST, ExpertSizes, choose_kernel
from expert_server.kernels.kernel import UnsupportedError
from expert_server.kernels.trial import replica_bytes
from expert_server.weights.reader import ExpertReader
from expert_server.weights.weights import ExpertForm, ExpertWeights

FORM = ExpertForm(has_gate=False, is_transposed=False, activate=torch.relu)
SIZES = ExpertSizes(hidden=32, intermediate=16, num_experts=4, top_k=2)
FLOAT32, BFLOAT16 = KernelSpec(torch.float32), KernelSpec(torch.bfloat16)
QUANTISED = KernelSpec(torch.float32, Quantization.INT8)


class Fake(ReferenceKernel):
    """Correct."""

    is_closed = False

    def close(self) -> None:
        super().close()
        self.is_closed = True


class Inexact(Fake):
    """An error as is usual with bfloat16."""

    def __call__(self, *arguments: Any) -> torch.Tensor:
        return super().__call__(*arguments) * 1.005


class Poisoned(Fake):
    def __call__(self, *arguments: Any) -> torch.Tensor:
        out_TH = super().__call__(*arguments).clone()
        out_TH[-1, -1] = float("nan")
        return out_TH


class Careless(Fake):
    """Takes -1 for an expert."""

    def __call__(self, x_TH: Any, expert_ids_TK: Any, scores_TK: Any, layer: int) -> torch.Tensor:
        return super().__call__(x_TH, expert_ids_TK.clamp(min=0), scores_TK, layer)


class Unbiased(Fake):
    """Forgets the biases."""

    def load(self, layer: int, expert: int, weights: Any) -> None:
        super().load(layer, expert, type(weights)(weights.up, weights.down))


class Raising(Fake):
    def __call__(self, *arguments: Any) -> torch.Tensor:
        raise RuntimeError("no such\n  primitive")


class Unloadable(Fake):
    def load(self, *arguments: Any) -> None:
        raise AttributeError("torch has no such operator")


class Unstartable(Fake):
    def __init__(self, *arguments: Any) -> None:
        raise MemoryError("no room")


class Unsupported(Fake):
    def __init__(self, *arguments: Any) -> None:
        raise UnsupportedError("this CPU is too old")


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Fake]]:
    """Replace the real kernels except the reference, best first; returns the created ones."""

    def install(*kinds: type[Fake]) -> list[Fake]:
        created: list[Fake] = []

        def creates(kind: type[Fake]) -> Callable[..., Fake]:
            def create(*arguments: Any) -> Fake:
                created.append(kind(*arguments))
                created[-1].name = kind.__name__  # type: ignore[misc]
                return created[-1]

            return create

        kernels = {kind.__name__: creates(kind) for kind in kinds} | {"reference": ReferenceKernel}
        monkeypatch.setattr(choose, "KERNELS", kernels)
        return created

    return install


Install = Callable[..., list[Fake]]


# -- auto ----------------------------------------------------------------------------------------------


def test_the_first_that_can_serve_does(install, caplog, monkeypatch) -> None:
    created = install(Unsupported, Fake, Inexact)
    with caplog.at_level(logging.INFO, choose.__name__):
        choice = choose_kernel([FORM], FLOAT32, SIZES)
    assert [kernel.name for kernel in created] == [choice.kernel.name] == ["Fake"]
    assert (choice.kernel.count, choice.kernel.bytes) == (0, 0)
    assert choice.passed_over == {"Unsupported": "this CPU is too old"}
    (record,) = caplog.records
    assert record.levelname == "INFO"
    for words in ("kernel Fake", "not Unsupported: this CPU is too old"):
        assert words in record.message
    # Of the reference there is no trial: the start takes no extra time.
    install(Unsupported)
    monkeypatch.setattr(choose, "trial_error", None)
    assert choose_kernel([FORM], FLOAT32, SIZES).kernel.name == "reference"


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Inexact, "wrong: relative error 5.0e-03, more than 1e-05"),
        (Poisoned, "wrong: relative error nan"),
        (Careless, "wrong"),
        (Raising, "fails: no such primitive"),
        (Unloadable, "fails: torch has no such operator"),
        (Unstartable, "fails: no room"),
    ],
)
@pytest.mark.parametrize("other", [Fake, Unsupported])
def test_a_kernel_with_wrong_results_is_skipped(install, caplog, kind, why, other) -> None:
    created = install(kind, other)
    choice = choose_kernel([FORM], FLOAT32, SIZES)
    assert choice.kernel.name == ("Fake" if other is Fake else "reference")
    assert why in choice.passed_over[kind.__name__]
    (warning,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert kind.__name__ in warning.message
    assert all(kernel.is_closed for kernel in created if kernel.name == kind.__name__)


def test_wrong_biases_are_noticed(install: Install) -> None:
    install(Unbiased)
    assert choose_kernel([FORM], FLOAT32, SIZES).kernel.name == "Unbiased"
    biased = ExpertSizes(32, 16, 4, 2, has_bias=True)
    assert choose_kernel([FORM], FLOAT32, biased).kernel.name == "reference"


# -- as the settings say -------------------------------------------------------------------------------


def test_a_kernel_by_name(install: Install) -> None:
    install(Fake, Inexact)  # bfloat16 has a larger error bound.
    for name in ("Inexact", "reference"):
        choice = choose_kernel([FORM], BFLOAT16, SIZES, name)
        assert (choice.kernel.name, choice.kernel.count) == (name, 0)


@pytest.mark.parametrize(
    ("kind", "why"),
    [(Unsupported, "too old"), (Inexact, "its results are wrong"), (Raising, "fails")],
)
def test_a_kernel_by_name_that_cannot_serve(install: Install, kind: type[Fake], why: str) -> None:
    install(Fake, kind)
    with pytest.raises(
        ConfigError, match=rf"kernel {kind.__name__}.* cannot serve .*{why}.*; give --kernel auto$"
    ):
        choose_kernel([FORM], FLOAT32, SIZES, kind.__name__)


def test_quantised_weights_are_checked_against_their_rounded_values(install: Install) -> None:
    class Plain(Fake):
        """Ignores the quantisation."""

        def __init__(self, forms: Sequence[ExpertForm], spec: KernelSpec) -> None:
            super().__init__(forms, KernelSpec(spec.dtype))

    install(Plain, Fake)
    choice = choose_kernel([FORM], QUANTISED, SIZES)
    assert choice.kernel.name == "Fake"
    assert "its results are wrong" in choice.passed_over["Plain"]


def test_no_kernel_supports_the_quantisation(install: Install) -> None:
    install(Unsupported, Inexact)
    with pytest.raises(
        ConfigError, match=r"int8.*Unsupported: this CPU.*Inexact: .*; give --quantization none$"
    ):
        choose_kernel([FORM], QUANTISED, SIZES)
    with pytest.raises(ConfigError, match=r"; give --kernel auto or --quantization none$"):
        choose_kernel([FORM], QUANTISED, SIZES, "Inexact")
    assert choose_kernel([FORM], QUANTISED, SIZES, "reference").kernel.name == "reference"


STORED = [FORMATS[place] for place in (0, 2, 6, 8, 10, 13)]
each_stored = pytest.mark.parametrize("stored", STORED, ids=str)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "given",
    [
        *({"quantization": quantization} for quantization in Quantization),
        *({"stored": stored} for stored in STORED),
    ],
    ids=str,
)
def test_the_compiled_kernel_serves_each_format(dtype: torch.dtype, given: dict[str, Any]) -> None:
    sizes = ExpertSizes(300, 130, 4, 2)
    kernel = choose_kernel([FORM], KernelSpec(dtype, **given), sizes).kernel
    assert kernel.name == "native"
    kernel.close()


@each_stored
def test_stored_weights_are_dequantised_on_request_only(install, stored) -> None:
    spec = KernelSpec(torch.bfloat16, stored=stored)
    install(Unsupported)
    for wanted in ("auto", "Unsupported"):
        with pytest.raises(
            ConfigError, match=r"this CPU is too old\); give --kernel reference"
        ) as caught:
            choose_kernel([FORM], spec, SIZES, wanted)
        assert f"with {stored} weights" in str(caught.value)
    assert choose_kernel([FORM], spec, SIZES, "reference").kernel.name == "reference"


def test_stored_weights_are_checked_against_their_values(install: Install) -> None:
    class Halved(Fake):
        """Takes scales for others."""

        def pack(self, weights: ExpertWeights, *arguments: Any) -> ExpertWeights:
            assert isinstance(weights.down, QuantizedMatrix)
            down = replace(weights.down, scales=weights.down.scales / 2)
            return super().pack(replace(weights, down=down), *arguments)

    install(Halved, Fake)
    choice = choose_kernel([FORM], KernelSpec(torch.bfloat16, stored=STORED[0]), SIZES)
    assert choice.kernel.name == "Fake"
    assert "its results are wrong" in choice.passed_over["Halved"]


# -- the trial -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replica_bytes_are_known_before_loading(dtype: torch.dtype) -> None:
    spec, sizes = KernelSpec(dtype), ExpertSizes(32, 16, 4, 2)
    kernel = ReferenceKernel([FORM], spec)
    told = replica_bytes(kernel, FORM, spec, sizes)
    assert told == (2 + FORM.has_gate) * 32 * 16 * dtype.itemsize
    assert (kernel.count, kernel.bytes) == (0, 0)


@each_stored
def test_replica_bytes_of_stored_weights(stored: StoredFormat) -> None:
    """About as many as in the checkpoint; int4 in small groups has a float32 for each 32 inputs."""
    spec, sizes = KernelSpec(torch.bfloat16, stored=stored), ExpertSizes(1024, 512, 4, 2)
    kernel = choose_kernel([FORM], spec, sizes).kernel
    told = replica_bytes(kernel, FORM, spec, sizes)
    assert (kernel.count, kernel.bytes) == (0, 0)
    codes = 2 * 1024 * 512 * stored.format.bits // 8
    assert codes < told <= codes * (1.25 if stored.group in (32, 64) else 1.08)
    kernel.close()


# -- the real ones -------------------------------------------------------------------------------------


def sizes_of(checkpoint: Checkpoint) -> ExpertSizes:
    return ExpertSizes.of(next(iter(checkpoint.expert_modules().values())), 2)


def test_sizes_come_from_the_model(path: Path) -> None:
    is_gpt_oss = Checkpoint.open(path).shape.model_type == "gpt_oss"
    assert sizes_of(Checkpoint.open(path)) == ExpertSizes(64, 32, 8, 2, has_bias=is_gpt_oss)


@pytest.mark.parametrize(
    "spec",
    [
        FLOAT32,
        BFLOAT16,
        KernelSpec(torch.bfloat16, Quantization.INT8),
        KernelSpec(torch.bfloat16, stored=STORED[1]),
    ],
    ids=["float32", "bfloat16", "int8", "mxfp4"],
)
def test_native_serves(path: Path, spec: KernelSpec) -> None:
    checkpoint = Checkpoint.open(path)
    choice = choose_kernel(ExpertReader(checkpoint).forms, spec, sizes_of(checkpoint))
    assert (choice.kernel.name, choice.passed_over) == ("native", {})
    choice.kernel.close()


def test_unknown_activations_and_float64_are_left_to_the_reference() -> None:
    unknown = ExpertForm(has_gate=False, is_transposed=False, activate=torch.atan)
    assert choose_kernel([unknown], FLOAT32, SIZES).kernel.name == "reference"
    assert choose_kernel([FORM], KernelSpec(torch.float64), SIZES).kernel.name == "reference"


def test_the_settings_have_these_kernels_and_quantisations() -> None:
    fields = ExpertServerConfig.model_fields
    assert get_args(fields["kernel"].annotation) == ("auto", *KERNELS, *ON_REQUEST)
    assert get_args(fields["quantization"].annotation) == tuple(map(str, Quantization))
