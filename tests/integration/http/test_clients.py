"""Clients that others made, unchanged. Each is installed by its name: pip install lm-eval ..."""

from __future__ import annotations

import json
import os
import string
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pydantic
import pytest

from http_box import SIZES, Box, tiny_model

pytestmark = [
    pytest.mark.integration,
    pytest.mark.nightly,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),  # theirs
]


class Anything(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow")


@pytest.fixture(scope="module")
def shared_box() -> Iterator[Box]:
    with Box(sizes=replace(SIZES, num_blocks=500)) as box:
        yield box


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "LITELLM_LOCAL_MODEL_COST_MAP"):
        monkeypatch.setenv(name, "True")


@pytest.fixture
def base(box: Box) -> str:
    return f"{box.url}/v1"


def _run(directory: Path, *command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=directory,
        env=os.environ | {"HF_HOME": str(directory)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


# lm-eval


def _task(directory: Path, name: str, rows: list[dict[str, Any]], fields: dict[str, Any]) -> None:
    data = directory / f"{name}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}}
    task = {"task": name, "test_split": "test", "target_delimiter": "", "doc_to_text": "{{text}}"}
    (directory / f"{name}.yaml").write_text(json.dumps(task | dataset | fields))  # JSON is YAML


def _write_tasks(directory: Path, likely: dict[str, str]) -> None:
    """Write two tasks.

    Args:
        directory: Where to.
        likely: Prompts, and how the model continues each.
    """
    choices = [
        {"text": text, "choices": [" x", best, "été\n y", best + "z"], "answer": index % 4}
        for index, (text, best) in enumerate(likely.items())
    ]
    choice = {"doc_to_choice": "{{choices}}", "doc_to_target": "{{answer}}"}
    accuracy = {"metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}]}
    _task(directory, "choice", choices, {"output_type": "multiple_choice"} | choice | accuracy)
    answers = [
        {"text": text, "answer": best if index % 2 else "no"}
        for index, (text, best) in enumerate(likely.items())
    ]
    greedy = {"until": ["\n\n\n"], "max_gen_toks": 2, "do_sample": False}
    text = {"doc_to_target": "{{answer}}", "generation_kwargs": greedy}
    match = {"metric_list": [{"metric": "exact_match"}]}
    _task(directory, "text", answers, {"output_type": "generate_until"} | text | match)


def _evaluate(tasks: Path, output: str, *options: str) -> tuple[dict[str, Any], dict[Any, Any]]:
    """Run both tasks; return lm-eval's scores, and the responses by task, document and position."""
    _run(
        tasks,
        *("lm_eval", *options, "--include_path", str(tasks), "--tasks", "choice,text"),
        *("--log_samples", "--output_path", output),
    )
    (file,) = (tasks / output).rglob("results_*.json")
    responses = {}
    for task in ("choice", "text"):
        (samples,) = (tasks / output).rglob(f"samples_{task}_*.jsonl")
        for sample in map(json.loads, samples.read_text().splitlines()):
            for index, (response,) in enumerate(sample["resps"]):
                responses[task, sample["doc_id"], index] = response
    return json.loads(file.read_text())["results"], responses


def test_lm_eval_gives_the_scores_of_its_own_backend(box: Box, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    checkpoint = tmp_path / "tiny"
    tiny_model().save_pretrained(checkpoint)
    box.tokenizer.save_pretrained(checkpoint)
    # Bytes that are no text have other tokens when they are read again.
    answers = {
        text: box.complete(text, max_tokens=2)["choices"][0] for text in string.ascii_letters
    }
    likely = {text: each["text"] for text, each in answers.items() if each["text"].isascii()}
    assert len(likely) > 4
    _write_tasks(tmp_path, likely)

    own = ("--model", "hf", "--device", "cpu")
    scores, responses = _evaluate(
        tmp_path, "own", *own, "--model_args", f"pretrained={checkpoint},dtype=float32"
    )
    served = f"model=tiny,base_url={box.url}/v1/completions,tokenizer={checkpoint},max_length=512"
    for options in ((served,), (f"{served},num_concurrent=4", "--batch_size", "4")):
        output = str(len(options))
        client = ("--model", "local-completions", "--model_args", *options)
        served_scores, served_responses = _evaluate(tmp_path, output, *client)
        assert served_scores == scores
        assert served_responses.keys() == responses.keys()
        for key, response in served_responses.items():
            if key[0] == "text":
                assert response == responses[key]
                continue
            (logprob, is_greedy), (own_logprob, own_is_greedy) = response, responses[key]
            assert float(logprob) == pytest.approx(float(own_logprob), abs=1e-3)
            assert is_greedy == own_is_greedy
    flags = {str(response[1]) for key, response in responses.items() if key[0] == "choice"}
    assert flags == {"True", "False"}
    assert 0 < scores["text"]["exact_match,none"] < 1


# LangChain


def test_langchain_json_mode(box: Box, base: str) -> None:
    chat = pytest.importorskip("langchain_openai").ChatOpenAI
    (end,) = box.tokenizer("}", add_special_tokens=False)["input_ids"]
    fields = {"temperature": 1.0, "seed": 1, "max_tokens": 300}
    fields["logit_bias"] = {end: 20}  # a random model ends an object late
    model = chat(model="tiny", base_url=base, api_key="none", max_retries=0, **fields)
    model = model.with_structured_output(Anything, method="json_mode")
    assert isinstance(model.invoke("Answer in JSON."), Anything)


@pytest.mark.parametrize("fields", [{}, {"n": 2, "temperature": 1.0}, {"batch_size": 1}])
def test_langchain_generates_from_several_prompts(
    box: Box, base: str, fields: dict[str, Any]
) -> None:
    openai = pytest.importorskip("langchain_openai").OpenAI
    fields = {"temperature": 0, "max_tokens": 4, "seed": 1} | fields
    model = openai(model="tiny", base_url=base, api_key="none", max_retries=0, **fields)
    result = model.generate(list(box.expected))
    assert [len(each) for each in result.generations] == 3 * [fields.get("n", 1)]
    if fields["temperature"] == 0:
        texts = [each[0].text for each in result.generations]
        assert texts == [box.text(prompt, 4) for prompt in box.expected]
    assert result.llm_output["token_usage"]["completion_tokens"] == 12 * fields.get("n", 1)


# LiteLLM


def test_litellm_completes_texts(box: Box, base: str) -> None:
    litellm = pytest.importorskip("litellm")
    server = {"api_base": base, "api_key": "none"}
    for provider in ("text-completion-openai", "hosted_vllm"):
        body = {"model": f"{provider}/tiny", "temperature": 0, "max_tokens": 5} | server
        whole = litellm.text_completion(**body, prompt="Hello").choices[0].text
        assert whole == box.text("Hello", 5)
        streamed = litellm.text_completion(**body, prompt="Hello", stream=True)
        assert "".join(chunk.choices[0].text or "" for chunk in streamed) == whole
    body["model"] = "text-completion-openai/tiny"
    several = litellm.text_completion(**body, prompt=list(box.expected)).choices
    assert [each.text for each in several] == [box.text(prompt, 5) for prompt in box.expected]


# guidellm


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_guidellm(box: Box, tmp_path: Path, path: str) -> None:
    pytest.importorskip("guidellm")
    _run(
        tmp_path,
        *("guidellm", "run", "--disable-console"),
        *("--backend", f"kind=openai_http,target={box.url},request_format={path}"),
        *("--profile", "kind=concurrent,streams=2"),
        *("--constraint", "kind=max_requests,count=6"),
        *("--data", "kind=synthetic_text,prompt_tokens=40,output_tokens=16"),
        *("--tokenizer", f"kind=huggingface_auto,model={box.tokenizer.name_or_path}"),
    )
    (benchmark,) = json.loads((tmp_path / "benchmarks.json").read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert len(requests["successful"]) == 6
    assert not requests["errored"] + requests["incomplete"]
    assert {request["output_tokens"] for request in requests["successful"]} == {16}
