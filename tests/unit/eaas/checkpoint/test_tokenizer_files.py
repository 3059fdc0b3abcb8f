"""Files that only attention clients read: what transformers cannot use is refused before it is imported."""

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, GenerationConfig

from eaas.checkpoint.local import LocalSource
from eaas.checkpoint.text_files import LFS_POINTER
from eaas.checkpoint.tokenizer_files import check_client_files
from eaas.errors import CheckpointError
from eaas_cli.demo_model.tokenizer import build_tokenizer

# One value of each kind, and objects and lists of several.
VALUES: list[Any] = [
    *(None, True, -3, 7, 1.5, "left", [], [1], ["x"], [None], {}, {"a": "b"}, {"a": 1}),
    *({"1": {"content": "<|x|>"}}, {"1": {"content": 1}}, {"1": None}, {"x": {"content": "x"}}),
    *([{"content": "x"}], [{"name": "a"}], [{"name": "default", "template": "b"}]),
    {"__type": "AddedToken", "content": "<|bos|>"},
    {"content": "<|bos|>"},
    {"default": "b"},
]
FIELDS = (
    *("added_tokens_decoder", "additional_special_tokens", "extra_special_tokens"),
    *("model_specific_special_tokens", "bos_token", "mask_token", "model_max_length"),
    *("padding_side", "truncation_side", "chat_template", "tokenizer_class", "auto_map"),
    *("model_input_names", "init_inputs", "chat_control_tokens"),
    "split_special_tokens",
)
DEFAULTS = ("temperature", "top_k", "max_new_tokens", "eos_token_id", "pad_token_id")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The files of a good tokenizer."""
    build_tokenizer(300, 64).save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe"}')
    return tmp_path


def edit(file: Path, **fields: Any) -> None:
    document = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(document | fields))


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        check_client_files(LocalSource(path))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def is_refused(path: Path) -> bool:
    try:
        check_client_files(LocalSource(path))
    except CheckpointError:
        return True
    return False


def test_good_files_pass_without_torch_or_transformers(path: Path) -> None:
    code = (
        "import sys; from eaas.checkpoint.local import LocalSource;"
        "from eaas.checkpoint.tokenizer_files import check_client_files;"
        "check_client_files(LocalSource(sys.argv[1]));"
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code, str(path)]
    assert subprocess.run(command, timeout=60, check=False).returncode == 0


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"pre_tokenizer": {"type": "Next"}}, "pre_tokenizer is of type 'Next'"),
        ({"normalizer": {"type": "Next"}}, "normalizer is of type 'Next'"),
        ({"decoder": {"type": "Next"}}, "decoder is of type 'Next'"),
        ({"post_processor": {"type": "Next"}}, "post_processor is of type 'Next'"),
        ({"model": {"type": "Next"}}, "model is of type 'Next'"),
        (
            {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Next"}]}},
            "pre_tokenizer is of type 'Next'",
        ),
        ({"version": "2.0"}, "Unknown tokenizer version '2.0'"),
        ({"added_tokens": None}, "invalid type: null, expected a sequence"),
    ],
)
def test_a_tokenizer_of_another_release(path: Path, fields: dict[str, Any], words: str) -> None:
    edit(path / "tokenizer.json", **fields)
    message = refusal(path)
    assert message.startswith(f"{path}/tokenizer.json: line 1 column ")
    assert words in message


def test_merges_of_another_kind(path: Path) -> None:
    model = json.loads((path / "tokenizer.json").read_text())["model"]
    edit(path / "tokenizer.json", model=model | {"merges": {"a": "b"}})
    assert "model.merges has another form, which tokenizers " in refusal(path)


@pytest.mark.parametrize("cut", [0, 1, 1000, -1])
def test_a_cut_tokenizer(path: Path, cut: int) -> None:
    file = path / "tokenizer.json"
    file.write_bytes(file.read_bytes().rstrip()[:cut])
    assert refusal(path).startswith(f"{file} is {'not JSON' if cut else 'empty'}")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model", "vocab.json"])
@pytest.mark.parametrize("data", [b"", LFS_POINTER + b".github.com/spec/v1\n"])
def test_a_vocabulary_that_was_not_fetched(path: Path, name: str, data: bytes) -> None:
    (path / name).write_bytes(data)
    assert refusal(path).startswith(
        f"{path}/{name} is {'a pointer of Git LFS' if data else 'empty'}"
    )


@pytest.mark.parametrize(
    "name",
    [
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "generation_config.json",
    ],
)
@pytest.mark.parametrize("text", ["null", "[]", '{"a": '])
def test_no_object(path: Path, name: str, text: str) -> None:
    (path / name).write_text(text)
    assert refusal(path).startswith(f"{path}/{name} ")


@pytest.mark.parametrize("field", FIELDS)
def test_what_transformers_cannot_use_is_refused(path: Path, field: str) -> None:
    refused = 0
    if field == "additional_special_tokens":
        # It is the former name of this one.
        edit(path / "tokenizer_config.json", extra_special_tokens=None)
    for value in VALUES:
        edit(path / "tokenizer_config.json", **{field: value})
        if is_refused(path):
            refused += 1
            assert refusal(path).startswith(f"{path}/tokenizer_config.json: {field}")
            continue
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        if isinstance(tokenizer.chat_template, str):
            tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
    assert 0 < refused < len(VALUES)


@pytest.mark.parametrize("field", DEFAULTS)
def test_sampling_defaults_of_another_kind(path: Path, field: str) -> None:
    for value in VALUES:
        edit(path / "generation_config.json", **{field: value})
        if is_refused(path):
            assert refusal(path).startswith(f"{path}/generation_config.json: {field} is ")
        else:
            GenerationConfig.from_pretrained(path, local_files_only=True)
            assert value is None or isinstance(value, int | float | list)


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("top_p", 0, "0 ("),
        ("repetition_penalty", 1e-50, "1e-50 ("),
        ("max_new_tokens", 0, "0 ("),
        ("temperature", "hot", '"hot" (Input should be a valid'),
    ],
)
def test_a_default_that_no_request_may_have(
    path: Path, field: str, value: object, told: str
) -> None:
    edit(path / "generation_config.json", **{field: value})
    assert f"generation_config.json: {field} is {told}" in refusal(path)


@pytest.mark.parametrize("name", ["chat_template.jinja", "additional_chat_templates/rag.jinja"])
def test_a_template_with_a_syntax_error(path: Path, name: str) -> None:
    (path / name).parent.mkdir(exist_ok=True)
    (path / name).write_text("{% for m in messages %}\n{{ m }}\n{% endfo %}")
    assert refusal(path).startswith(f"{path}/{name}: line 3: Encountered unknown tag 'endfo'.")
    assert ".:" not in refusal(path)


@pytest.mark.parametrize(
    ("template", "place"),
    [
        ("{{ x", "chat_template: line 1: "),
        (
            [{"name": "default", "template": "\n{{ x | none }}"}],
            "chat_template 'default': line 2: ",
        ),
        ({"default": "{% if %}"}, "chat_template 'default': line 1: "),
    ],
)
def test_a_field_with_a_syntax_error(path: Path, template: Any, place: str) -> None:
    edit(path / "tokenizer_config.json", chat_template=template)
    assert refusal(path).startswith(f"{path}/tokenizer_config.json: {place}")
    # transformers prefers the file.
    (path / "chat_template.jinja").write_text("x")
    check_client_files(LocalSource(path))


def test_what_transformers_adds_to_jinja_is_read(path: Path) -> None:
    (path / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m.x %}{% continue %}{% endif %}{% generation %}{{ m | tojson }}"
        "{% endgeneration %}{{ strftime_now('%Y') }}{{ raise_exception('x') }}{% endfor %}"
    )
    check_client_files(LocalSource(path))


def test_templates_without_a_default_are_told(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    named = [{"name": "rag", "template": "R"}, {"name": "plain", "template": "P"}]
    edit(path / "tokenizer_config.json", chat_template=named)
    with caplog.at_level(logging.WARNING):
        check_client_files(LocalSource(path))
    assert "'rag', 'plain', and none of them 'default'" in caplog.text
    caplog.clear()
    edit(
        path / "tokenizer_config.json", chat_template=[*named, {"name": "default", "template": ""}]
    )
    check_client_files(LocalSource(path))
    assert not caplog.text
