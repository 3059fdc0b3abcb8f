"""Demo models: deterministic, without near ties, with a lossless tokenizer."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from eaas.checkpoint import Checkpoint, precheck, quiet_transformers
from eaas.errors import ConfigError
from eaas_cli.demo_model import ARCHITECTURES, write_demo_model

TINY: dict[str, Any] = {"layers": 3, "hidden": 64, "experts": 8, "top_k": 2}
# With and without shared experts and MLA; `make test-nightly` takes the others, too.
SOME_ARCHITECTURES = [
    pytest.param(arch, marks=[pytest.mark.nightly] * (arch not in ("qwen3_moe", "deepseek_v3")))
    for arch in ARCHITECTURES
]
QUESTIONS = ["Hello there", "What makes bread rise?", "ünïcode ✓", "one two", "Anna", "stars"]


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def load(path: Path) -> tuple[Any, Any]:
    with quiet_transformers():
        model = AutoModelForCausalLM.from_pretrained(
            path, experts_implementation="eager", local_files_only=True
        )
        return model, AutoTokenizer.from_pretrained(path, local_files_only=True)


def ask(tokenizer: Any, question: str) -> torch.Tensor:
    messages = [{"role": "user", "content": question}]
    encoded = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt"
    )
    return encoded["input_ids"]


def generate(model: Any, prompt_1T: torch.Tensor, tokens: int) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens and their logits (N, V)."""
    options = {"output_logits": True, "return_dict_in_generate": True}
    mask_1T = torch.ones_like(prompt_1T)
    out = model.generate(prompt_1T, attention_mask=mask_1T, max_new_tokens=tokens, **options)
    return out.sequences[0, prompt_1T.shape[1] :].tolist(), torch.cat(out.logits)


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.nightly) for n in (1, 2))])
@pytest.mark.parametrize("arch", SOME_ARCHITECTURES)
def test_greedy_text_is_decisive_and_the_experts_decide_it(
    tmp_path: Path, arch: str, seed: int
) -> None:
    """No near tie after the first token, no collapse, other words for other prompts and without
    experts.

    The first token hangs on the whole prompt, so its gap has no floor; it is still far above
    rounding.
    """
    path = tmp_path / "x"
    write_demo_model(path, arch, seed=seed, **TINY)
    model, tokenizer = load(path)
    answers, gaps_N = [], []
    for question in QUESTIONS:
        prompt_1T = ask(tokenizer, question)
        tokens, logits_NV = generate(model, prompt_1T, 12)
        first, second = logits_NV.topk(2).values.T
        gap_N = (first - second) / first.abs()
        assert gap_N[0] > 1e-5
        gaps_N.append(gap_N[1:])
        assert len(set(tokens)) >= 5
        answers.append(tokens)
    assert torch.cat(gaps_N).min() > 1e-3
    assert len({tuple(tokens) for tokens in answers}) >= 3

    prompt_1T = torch.tensor([answers[0]])
    with torch.inference_mode():
        whole_T = model(prompt_1T).logits[0].argmax(-1)
        for name, module in model.named_modules():
            if name.endswith(".experts"):
                module.register_forward_hook(lambda _module, _args, out: out * 0)
        without_T = model(prompt_1T).logits[0].argmax(-1)
    assert (whole_T == without_T).float().mean() < 0.5


@pytest.mark.parametrize("arch", SOME_ARCHITECTURES)
def test_same_seed_same_bytes(tmp_path: Path, arch: str) -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    write_demo_model(tmp_path / "a", arch, seed=5, vocab=400, max_shard_size="200KB", **TINY)
    write_demo_model(tmp_path / "c", arch, seed=6, vocab=400, max_shard_size="200KB", **TINY)
    assert torch.equal(torch.rand(4), expected), "the caller's random state is left alone"
    torch.set_num_threads(2)
    write_demo_model(tmp_path / "b", arch, seed=5, vocab=400, max_shard_size="200KB", **TINY)
    files = sorted(file.name for file in (tmp_path / "a").iterdir())
    shards = [name for name in files if name.endswith(".safetensors")]
    assert files == sorted(file.name for file in (tmp_path / "b").iterdir())
    assert len(shards) > 1
    for name in files:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name
    assert any(
        (tmp_path / "a" / name).read_bytes() != (tmp_path / "c" / name).read_bytes()
        for name in shards
    )
    assert Checkpoint.open(tmp_path / "a").shape != Checkpoint.open(tmp_path / "c").shape


def test_defaults_make_a_whole_checkpoint(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_demo_model(tmp_path / "deep" / "x")
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")
    precheck(tmp_path / "deep" / "x")
    assert [entry.name for entry in (tmp_path / "deep").iterdir()] == ["x"]
    shape = Checkpoint.open(tmp_path / "deep" / "x").shape
    assert (shape.num_layers, shape.num_experts, shape.hidden_size, shape.top_k) == (4, 16, 128, 4)
    generation = json.loads((tmp_path / "deep" / "x" / "generation_config.json").read_text())
    assert generation["do_sample"] is False
    assert (generation["eos_token_id"], generation["pad_token_id"]) == (1, 2)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("tokenizer") / "x"
    write_demo_model(path, **TINY)
    return AutoTokenizer.from_pretrained(path, local_files_only=True)


@given(text=st.text())
def test_tokenizer_returns_any_text(tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(text, split_special_tokens=True)
    assert tokenizer.decode(ids) == text
    assert all(0 <= i < 1000 for i in ids)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_each_architecture_gets_that_tokenizer(tmp_path: Path, arch: str) -> None:
    """transformers picks tokenizer classes by model_type; none of them may change ours."""
    write_demo_model(tmp_path / "x", arch, **TINY)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "x", local_files_only=True)
    text = "  The river,\n\tünïcode ✓ 河 don't .  "
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("The river begins in the hills")) <= 8
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 1, 2)
    assert len(tokenizer) <= 1000


@pytest.mark.parametrize(
    "wrong",
    [
        {"arch": "llama"},
        {"dtype": "int8"},
        {"layers": 0},
        {"arch": "deepseek_v3", "layers": 1},
        {"hidden": 100},
        {"hidden": 16},
        {"experts": 1},
        {"experts": 4, "top_k": 5},
        {"top_k": 0},
        {"vocab": 100},
        {"seed": -1},
    ],
)
def test_wrong_arguments_are_named(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=list(wrong)[-1]):
        write_demo_model(tmp_path / "x", **wrong)
    assert list(tmp_path.iterdir()) == []


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="shard"):
        write_demo_model(tmp_path / "x", max_shard_size="many shards", **TINY)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arch", SOME_ARCHITECTURES)
@pytest.mark.parametrize(
    ("hidden", "experts", "top_k", "dtype"),
    [(32, 2, 1, "float32"), (48, 6, 5, "bfloat16"), (32, 3, 3, "float16")],
)
def test_odd_sizes_and_dtypes(
    tmp_path: Path, arch: str, hidden: int, experts: int, top_k: int, dtype: str
) -> None:
    sizes = {"layers": 2, "hidden": hidden, "experts": experts, "top_k": top_k, "vocab": 262}
    write_demo_model(tmp_path / "x", arch, dtype=dtype, **sizes)
    assert Checkpoint.open(tmp_path / "x").shape.dtype == dtype
    model, tokenizer = load(tmp_path / "x")
    assert model.dtype == getattr(torch, dtype)
    tokens, logits_NV = generate(model, ask(tokenizer, "Hi"), 3)
    assert len(tokens) == 3
    assert logits_NV.isfinite().all()


def test_only_demo_models_are_replaced(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.mkdir()
    write_demo_model(path, **TINY)
    first = Checkpoint.open(path).shape.digest
    write_demo_model(path, seed=1, **TINY)
    assert Checkpoint.open(path).shape.digest != first
    assert [entry.name for entry in tmp_path.iterdir()] == ["x"]

    (path / "demo_model.json").unlink()
    with pytest.raises(ConfigError, match="other than a demo model"):
        write_demo_model(path, **TINY)
    with pytest.raises(ConfigError, match="is a file"):
        write_demo_model(path / "config.json", **TINY)
    with pytest.raises(ConfigError, match="cannot be written"):
        write_demo_model(path / "config.json" / "x", **TINY)
