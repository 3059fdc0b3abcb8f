"""Each field of OpenAI's and vLLM's request models is done, refused or without effect, and in the docs."""

from __future__ import annotations

import json
import re
import typing
from pathlib import Path
from typing import Any

import pytest

from eaas.generation.errors import ApiError
from frontend.prompts.bodies import ChatRequest, CompletionRequest
from frontend.prompts.body import NO_EFFECT, REFUSED, parse
from vllm_python import NEEDS_VLLM, ROOT, run

# The fields of vLLM 0.32 beside those of openai.
KNOWN = json.loads(Path(__file__).with_name("known_fields.json").read_text())
CLASSES: dict[str, Any] = {"chat": ChatRequest, "completions": CompletionRequest}
NEEDED: dict[str, Any] = {
    "chat": {"messages": [{"role": "user", "content": "a"}]},
    "completions": {"prompt": "a"},
}


def kind(field: Any) -> str:
    return {NO_EFFECT: "No effect", REFUSED: "Refused"}.get(field.description, "Done")


def openais(path: str) -> set[str]:
    from openai.types.chat.completion_create_params import CompletionCreateParamsStreaming as Chat
    from openai.types.completion_create_params import CompletionCreateParamsStreaming as Completion

    return set(typing.get_type_hints({"chat": Chat, "completions": Completion}[path]))


@NEEDS_VLLM
@pytest.mark.nightly
def test_the_list_is_that_of_vllm() -> None:
    code = (
        "import json; from vllm.entrypoints.openai.chat_completion import protocol as chat;"
        "from vllm.entrypoints.openai.completion import protocol as text;"
        "print(json.dumps({'chat': sorted(chat.ChatCompletionRequest.model_fields),"
        "'completions': sorted(text.CompletionRequest.model_fields)}))"
    )
    theirs = json.loads(run(code).splitlines()[-1])
    for path, names in theirs.items():
        assert KNOWN[path] == [name for name in names if name not in openais(path)]


@pytest.mark.parametrize("path", CLASSES)
def test_no_field_of_theirs_is_forgotten(path: str) -> None:
    assert openais(path) | {*KNOWN[path]} <= CLASSES[path].model_fields.keys()


@pytest.mark.parametrize("path", CLASSES)
def test_a_refused_field_is_refused_with_a_remedy_or_reason(path: str) -> None:
    fields = CLASSES[path].model_fields
    for name in (name for name, field in fields.items() if kind(field) == "Refused"):
        with pytest.raises(ApiError, match=rf"^'{name}': is not supported") as caught:
            parse(CLASSES[path], NEEDED[path] | {name: "odd"})
        assert caught.value.param == name
        assert not parse(CLASSES[path], NEEDED[path] | {name: None}).ignored


@pytest.mark.parametrize("path", CLASSES)
def test_the_docs_list_the_fields(path: str) -> None:
    page = (ROOT / "docs/http-api.md").read_text()
    table = page.partition("\n## Fields\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[1:-1] for line in table.splitlines() if line.startswith("| ")]
    column = 1 + [*CLASSES].index(path)
    listed = {row[0].strip(): set(re.findall("`([a-z_]+)`", row[column])) for row in rows}
    shared = {row[0].strip(): set(re.findall("`([a-z_]+)`", row[3])) for row in rows}
    for each in ("Done", "Refused", "No effect"):
        fields = CLASSES[path].model_fields.items()
        assert listed[each] | shared[each] == {name for name, f in fields if kind(f) == each}
