"""config.json against the tensors and against what transformers knows, without transformers."""

import itertools
from typing import Any

import pytest
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from eaas.checkpoint.config_file import SAME_AS, check_config
from eaas.errors import CheckpointError, DenseModelError, UnsupportedModelError

CONFIG: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "dtype": "bfloat16",
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
}
TENSORS = [f"model.layers.{i}.mlp.experts.{e}.up_proj.weight" for i in (0, 1) for e in range(4)]


def refusal(error: type[CheckpointError] = CheckpointError, **fields: Any) -> str:
    with pytest.raises(error) as caught:
        check_config("x/config.json", CONFIG | fields, TENSORS)
    assert type(caught.value) is error
    return str(caught.value).removeprefix("x/config.json: ")


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"num_experts_per_tok": [1, 2], "num_key_value_heads": None, "dtype": None},
        {"num_hidden_layers": 1},  # the rest are layers that predict further tokens
        {"num_hidden_layers": 4, "num_layers": 2},  # each layer counts as two
        {"num_experts": 8, "num_local_experts": 4},
        {"num_experts": [4, 4]},
        {"text_config": {"num_experts": 4}, "num_experts": 8},
        {"torch_dtype": "float16"},
        {"vocab_size": 320, "pad_token_id": -1},
        {"sliding_window": 0, "use_sliding_window": False},
        {"rope_scaling": {"type": "yarn", "factor": 4, "mscale_all_dim": 0, "mscale": None}},
        {"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "no_rope": None}},
        {"num_experts": 0, "num_local_experts": 4},
        {"model_type": "kimi_k2"},
    ],
)
def test_good(fields: dict[str, Any]) -> None:
    check_config("x/config.json", CONFIG | fields, TENSORS)
    names = ["layers.0.mlp.shared_experts.7.up", "experts.9.up", "model.layers.1.experts.gate_up"]
    check_config("x/config.json", CONFIG | fields, [*TENSORS, *names])
    # An image encoder, whose model has its own names for the layers of text.
    others = ["vision.layers.0.up", "model.blocks.1.experts.up"]
    check_config("x/config.json", CONFIG | fields | {"num_hidden_layers": 9}, others)


COUNTS = ("hidden_size", "num_hidden_layers", "num_experts_per_tok")


@pytest.mark.parametrize(
    ("fields", "values"),
    [
        (COUNTS, ["big", -4, 0, 1.5, True, {}, [64, -1], "64"]),
        (("num_experts",), ["many", -1, 2.5, {}, [4, "x"]]),
        (("sliding_window",), [0, -5, "64", 2.5]),
        (("dtype", "torch_dtype"), ["bf16", "float8_e4m3fn", "int8", "torch.float32", 16]),
        (("rms_norm_eps", "rope_scaling", "n_group"), ["1e-6"]),
    ],
)
def test_a_value_of_another_kind(fields: tuple[str, ...], values: list[Any]) -> None:
    for field, value in itertools.product(fields, values):
        assert refusal(**{field: value}).startswith(f"{field} is "), value
        if field in COUNTS:
            assert refusal(text_config={field: value}).startswith(f"{field} is "), value


def test_counts_that_do_not_fit() -> None:
    assert "num_hidden_layers is 3, and the files have 2 layers" in refusal(num_hidden_layers=3)
    assert "num_experts is 8, and the files have 4 experts" in refusal(num_experts=8)
    assert "num_experts is 2, and the files have 4 experts" in refusal(num_experts=2)
    assert "num_experts_per_tok is 5, more than the 4 experts" in refusal(num_experts_per_tok=5)


@pytest.mark.parametrize("count", [0, 1, [1, 1], []])
def test_a_model_without_a_choice_of_experts(count: Any) -> None:
    """It is dense, whatever its other fields for experts say."""
    message = refusal(DenseModelError, num_experts=count, num_experts_per_tok=8)
    assert message.startswith(f"num_experts is {count}: a model with a single expert or none")


@pytest.mark.parametrize("token", [320, -321, 10**30])
def test_a_padding_token_beyond_the_vocabulary(token: int) -> None:
    message = refusal(vocab_size=320, pad_token_id=token)
    assert message.startswith(f"pad_token_id is {token}, beyond the vocabulary of 320 tokens")


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters", "layers", "top"])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rope_theta", "10000"),
        ("rope_theta", 0),
        ("rope_theta", float("inf")),
        ("factor", "4.0"),
        ("factor", -4.0),
        ("factor", True),
        ("original_max_position_embeddings", "64"),
        ("original_max_position_embeddings", 10**400),
        ("mscale", "1"),
        ("mscale_all_dim", float("nan")),
        ("short_factor", "1.0"),
        ("short_factor", [1.0, "2.0"]),
        ("long_factor", [1.0, 0]),
        ("long_factor", {}),
    ],
)
def test_settings_of_rotary_embeddings_are_numbers(name: str, field: str, value: Any) -> None:
    given = {"rope_type": "yarn", field: value}
    fields = {
        "top": given,
        "layers": {"rope_parameters": {"full_attention": given, "no_rope": None}},
    }.get(name, {name: given})
    assert refusal(**fields).startswith(f"{field} is ")
    assert refusal(text_config=fields).startswith(f"{field} is ")


@pytest.mark.parametrize("kind", ["nope", None, 5, ["yarn"]])
@pytest.mark.parametrize("name", ["rope_type", "type"])
def test_a_rope_type_that_transformers_has_not(name: str, kind: Any) -> None:
    for rope in ({name: kind}, {"full_attention": {name: kind}}):
        message = refusal(UnsupportedModelError, rope_parameters=rope)
        assert message.startswith(f"transformers has no {name} ")


def test_every_rope_type_of_transformers_is_known() -> None:
    for kind in ("default", *ROPE_INIT_FUNCTIONS, "mrope", "su"):
        check_config("x/config.json", CONFIG | {"rope_scaling": {"type": kind}}, TENSORS)


def test_every_architecture_of_transformers_is_known() -> None:
    for name in (*CONFIG_MAPPING_NAMES, *SAME_AS):
        check_config("x/config.json", CONFIG | {"model_type": name}, TENSORS)


@pytest.mark.parametrize("name", ["qwen9_moe", "x" * 500, 'a"b', "Qwen3Moe"])
def test_an_unknown_architecture(name: str) -> None:
    message = refusal(UnsupportedModelError, model_type=name)
    assert message.startswith("transformers has no model_type ")
    assert message.endswith(": use a model that it knows, or update it")
    assert len(message) < 160
    own = refusal(UnsupportedModelError, model_type=name, auto_map={"AutoConfig": "own.Config"})
    assert "(its own code is not run)" in own
