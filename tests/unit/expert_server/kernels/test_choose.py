"""The choice of the kernel: fast ones before slow ones, never a wrong one."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eaas.checkpoint import Checkpoint
from eaas.errors import ConfigError
from eaas_cli.demo_model import ARCHITECTURES, write_demo_model
from expert_server.kernels import ExpertKernel, KernelSpec, Quantization, ReferenceKernel, choose
from expert_server.kernels.choose import ExpertSizes, choose_kernel, fastest
from expert_server.kernels.kernel import UnsupportedError
from expert_server.kernels.registry import KERNEL_NAMES, create_kernel
from expert_server.kernels.trial import ROWS, Trial, replica_bytes
from expert_server.weights.weights import ExpertForm, ExpertReader

FORM = ExpertForm(has_gate=False, is_transposed=False, activate=torch.relu)
SIZES = ExpertSizes(hidden=32, intermediate=16, num_experts=4, top_k=2)
FLOAT32, BFLOAT16 = KernelSpec(torch.float32), KernelSpec(torch.bfloat16)
INT8 = KernelSpec(torch.float32, Quantization.INT8)


class Fake(ReferenceKernel):
    """Correct and fast."""

    is_closed = False

    def close(self) -> None:
        super().close()
        self.is_closed = True


class Slow(Fake):
    def __call__(self, *arguments: Any) -> torch.Tensor:
        time.sleep(0.02)
        return super().__call__(*arguments)


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


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[ExpertKernel]]:
    """Replace the real kernels except the reference, best first; returns the created ones."""

    def install(*kinds: type[Fake]) -> list[ExpertKernel]:
        classes = {kind.__name__: kind for kind in kinds} | {"reference": ReferenceKernel}
        created: list[ExpertKernel] = []

        def create(name: str, forms: Sequence[ExpertForm], spec: KernelSpec) -> ExpertKernel:
            kernel = classes[name](forms, spec)
            if name != "reference":
                kernel.name = name  # type: ignore[misc]
            created.append(kernel)
            return kernel

        monkeypatch.setattr(choose, "KERNEL_NAMES", tuple(classes))
        monkeypatch.setattr(choose, "create_kernel", create)
        return created

    return install


Install = Callable[..., list[ExpertKernel]]


# -- the fastest ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [(Slow, Fake), (Fake, Slow)])
def test_the_fastest_serves(install: Install, order: tuple[type[Fake], ...]) -> None:
    created = install(*order)
    choice = choose_kernel([FORM], FLOAT32, SIZES)
    assert choice.kernel.name == "Fake"
    assert (choice.kernel.count, choice.kernel.bytes) == (0, 0)
    assert choice.passed_over == {}
    assert list(choice.seconds) == [kind.__name__ for kind in order]
    for least, slow in zip(choice.seconds["Fake"], choice.seconds["Slow"], strict=True):
        assert 0 < least < slow
        assert slow >= 0.02
    # The reference is not created; kernels that do not serve are closed.
    assert {kernel.name: kernel.is_closed for kernel in created} == {"Fake": False, "Slow": True}  # type: ignore[attr-defined]


def test_the_choice_is_logged_with_its_reason(
    install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    install(Unsupported, Slow, Fake)
    with caplog.at_level(logging.INFO, choose.__name__):
        choose_kernel([FORM], FLOAT32, SIZES)
    (record,) = caplog.records
    assert record.levelname == "INFO"
    for words in ("kernel Fake", "Slow 2", " ms", "not Unsupported: this CPU is too old"):
        assert words in record.message


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ({"a": (1.0,), "b": (1.0,)}, "a"),
        ({"a": (1.0,), "b": (0.91,)}, "a"),
        ({"a": (1.0,), "b": (0.89,)}, "b"),
        ({"a": (1.0, 1.0, 1.0), "b": (0.5, 1.0, 2.0)}, "a"),
        ({"a": (1.0, 1.0, 1.0), "b": (0.5, 1.0, 1.0)}, "b"),
        ({"a": (1.0,), "b": (0.85,), "c": (0.8,)}, "b"),
    ],
)
def test_a_slightly_slower_preferred_kernel_is_chosen(
    times: dict[str, tuple[float, ...]], expected: str
) -> None:
    assert fastest(times) == expected


@given(
    times=st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=4),
    jitter=st.lists(st.floats(0.96, 1.04), min_size=4, max_size=4),
)
def test_noise_does_not_change_the_choice_between_equals(
    times: list[float], jitter: list[float]
) -> None:
    noisy = {str(place): [noise * t for t in times] for place, noise in enumerate(jitter)}
    assert fastest(noisy) == "0"


def test_a_single_kernel_is_not_timed(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install(Fake, Unsupported)
    monkeypatch.setattr(choose, "_measure", None)
    choice = choose_kernel([FORM], FLOAT32, SIZES)
    assert (choice.kernel.name, choice.seconds) == ("Fake", {})
    assert choice.passed_over == {"Unsupported": "this CPU is too old"}


# -- the right ones ------------------------------------------------------------------------------------


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
def test_a_kernel_with_wrong_results_is_skipped(
    install: Install,
    caplog: pytest.LogCaptureFixture,
    kind: type[Fake],
    why: str,
    other: type[Fake],
) -> None:
    created = install(kind, other)
    choice = choose_kernel([FORM], FLOAT32, SIZES)
    assert choice.kernel.name == ("Fake" if other is Fake else "reference")
    assert why in choice.passed_over[kind.__name__]
    (warning,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert kind.__name__ in warning.message
    assert all(k.is_closed for k in created if k.name == kind.__name__)  # type: ignore[attr-defined]


def test_wrong_biases_are_noticed(install: Install) -> None:
    install(Unbiased)
    assert choose_kernel([FORM], FLOAT32, SIZES).kernel.name == "Unbiased"
    biased = ExpertSizes(32, 16, 4, 2, has_bias=True)
    assert choose_kernel([FORM], FLOAT32, biased).kernel.name == "reference"


def test_bfloat16_has_a_larger_error_bound(install: Install) -> None:
    install(Inexact)
    assert choose_kernel([FORM], BFLOAT16, SIZES).kernel.name == "Inexact"
    assert choose_kernel([FORM], FLOAT32, SIZES).kernel.name == "reference"


def test_an_unsupported_kernel_logs_no_warning(
    install: Install, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(Unsupported)
    # No trial: the start takes no extra time.
    monkeypatch.setattr(Trial, "experts", None)
    choice = choose_kernel([FORM], FLOAT32, SIZES)
    assert choice.kernel.name == "reference"
    assert [record for record in caplog.records if record.levelname == "WARNING"] == []


# -- as the settings say -------------------------------------------------------------------------------


def test_a_kernel_by_name(install: Install) -> None:
    install(Fake, Slow)
    choice = choose_kernel([FORM], FLOAT32, SIZES, "Slow")
    assert (choice.kernel.name, choice.kernel.count, choice.seconds) == ("Slow", 0, {})
    assert choose_kernel([FORM], FLOAT32, SIZES, "reference").kernel.name == "reference"


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
    choice = choose_kernel([FORM], INT8, SIZES)
    assert choice.kernel.name == "Fake"
    assert "its results are wrong" in choice.passed_over["Plain"]


def test_no_kernel_supports_the_quantisation(install: Install) -> None:
    install(Unsupported, Inexact)
    with pytest.raises(
        ConfigError, match=r"int8.*Unsupported: this CPU.*Inexact: .*; give --quantization none$"
    ):
        choose_kernel([FORM], INT8, SIZES)
    with pytest.raises(ConfigError, match=r"; give --kernel auto or --quantization none$"):
        choose_kernel([FORM], INT8, SIZES, "Inexact")
    assert choose_kernel([FORM], INT8, SIZES, "reference").kernel.name == "reference"


# -- the trial -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "experts"),
    [
        (SIZES, 4),
        (ExpertSizes(32, 16, 100, 8), 8),
        (ExpertSizes(32, 16, 1, 1), 1),
        (ExpertSizes(2048, 768, 128, 8), 5),
        (ExpertSizes(7168, 2048, 16, 8), 2),
    ],
)
def test_few_experts_are_enough(sizes: ExpertSizes, experts: int) -> None:
    form = ExpertForm(has_gate=True, is_transposed=False, activate=torch.relu)
    assert Trial(form, FLOAT32, sizes).count == experts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replica_bytes_are_known_before_loading(dtype: torch.dtype) -> None:
    spec, sizes = KernelSpec(dtype), ExpertSizes(32, 16, 4, 2)
    kernel = ReferenceKernel([FORM], spec)
    told = replica_bytes(kernel, FORM, spec, sizes)
    assert told == (2 + FORM.has_gate) * 32 * 16 * dtype.itemsize
    assert (kernel.count, kernel.bytes) == (0, 0)
    for expert, weights in enumerate(Trial(FORM, spec, sizes).experts):
        kernel.load(0, expert, weights)
    assert kernel.bytes == told * kernel.count


@pytest.mark.parametrize("top_k", [1, 2, 3, 4, 9])
def test_batches(top_k: int) -> None:
    trial = Trial(FORM, BFLOAT16, ExpertSizes(32, 16, 4, top_k, has_bias=True))
    oracle = ReferenceKernel([FORM], KernelSpec(torch.float64))
    for expert, weights in enumerate(trial.experts):
        assert weights.up.dtype == torch.bfloat16
        assert weights.up_bias is not None
        oracle.load(0, expert, weights)
    for rows, batch in zip(ROWS, trial.batches, strict=True):
        counts = torch.bincount(batch.ids_TK.flatten() + 1, minlength=5)
        assert counts.min() >= rows
        assert counts.max() <= rows + 1 + min(top_k, 4)
        for ids in batch.ids_TK.tolist():
            assert len(set(ids)) == len(ids) == 1 + min(top_k, 4)
        torch.testing.assert_close(batch.compute(oracle), batch.exact_TH)
        assert batch.error(oracle) < 1e-12
        assert 0.1 < batch.exact_TH.std() < 10


# -- the real ones -------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=ARCHITECTURES)
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Checkpoint:
    path = tmp_path_factory.mktemp("demo") / request.param
    write_demo_model(path, request.param, layers=2, hidden=48, experts=3, top_k=2, vocab=262)
    return Checkpoint.open(path)


def sizes_of(checkpoint: Checkpoint) -> ExpertSizes:
    return ExpertSizes.of(next(iter(checkpoint.expert_modules().values())), 2)


def test_sizes_come_from_the_model(checkpoint: Checkpoint) -> None:
    is_gpt_oss = checkpoint.shape.model_type == "gpt_oss"
    assert sizes_of(checkpoint) == ExpertSizes(48, 24, 3, 2, has_bias=is_gpt_oss)


@pytest.mark.parametrize("name", KERNEL_NAMES)
@pytest.mark.parametrize("spec", [FLOAT32, BFLOAT16], ids=["float32", "bfloat16"])
def test_every_available_kernel_is_correct(
    checkpoint: Checkpoint, name: str, spec: KernelSpec
) -> None:
    forms = ExpertReader(checkpoint).forms
    try:
        create_kernel(name, forms, spec).close()
    except UnsupportedError as error:
        pytest.skip(str(error))
    choice = choose_kernel(forms, spec, sizes_of(checkpoint), name)
    assert choice.kernel.name == name
    choice.kernel.close()


def test_auto_finds_one(checkpoint: Checkpoint) -> None:
    choice = choose_kernel(ExpertReader(checkpoint).forms, FLOAT32, sizes_of(checkpoint))
    assert choice.kernel.name in KERNEL_NAMES
    choice.kernel.close()


def test_only_the_reference_computes_float64(checkpoint: Checkpoint) -> None:
    spec = KernelSpec(torch.float64)
    choice = choose_kernel(ExpertReader(checkpoint).forms, spec, sizes_of(checkpoint))
    assert choice.kernel.name == "reference"
