"""The endpoint obeys its OpenAPI schema: schemathesis sends valid and invalid requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import Any

import hypothesis
import pytest
import schemathesis
import torch
from hypothesis import given
from schemathesis.checks import load_all_checks
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

from eaas.generation.errors import ApiError
from frontend.prompts.anthropic_body import CountBody, MessagesBody
from frontend.prompts.bodies import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from frontend.prompts.body import parse
from frontend.prompts.responses_body import ResponsesBody
from http_box import Box

pytestmark = pytest.mark.integration

OPERATIONS = (
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/v1/responses/{name}"),
    ("DELETE", "/v1/responses/{name}"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{name}"),
    ("GET", "/eaas/v1/status"),
    ("GET", "/version"),
    ("GET", "/health"),
    ("GET", "/live"),
    ("GET", "/ping"),
    ("POST", "/ping"),
    ("GET", "/metrics"),
)


@pytest.fixture(scope="module")
def served() -> Iterator[Box]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with Box() as box:
        yield box
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def schema(served: Box) -> Any:
    load_all_checks()
    loaded = schemathesis.openapi.from_url(f"{served.url}/openapi.json")
    loaded.config.update(base_url=served.url)
    return loaded


def test_every_path_is_in_it(served: Box) -> None:
    document = served.http.get("/openapi.json").json()
    paths = {
        (method.upper(), path)
        for path, item in document["paths"].items()
        for method in item
        if method in ("get", "post", "delete")
    }
    assert paths == set(OPERATIONS)
    routes = {r.path.replace(":path", "") for r in served.app.router.routes}
    assert routes == {path for _, path in OPERATIONS} | {"/openapi.json"}


CASES = [
    *((*operation, GenerationMode.POSITIVE) for operation in OPERATIONS),
    # The other operations take no input.
    *((*operation, GenerationMode.NEGATIVE) for operation in OPERATIONS[:7]),
]


@pytest.mark.parametrize(("method", "path", "mode"), CASES)
def test_the_schema_is_true(
    schema: Any,
    served: Box,
    budget: Callable[..., hypothesis.settings],
    method: str,
    path: str,
    mode: GenerationMode,
) -> None:
    operation = schema[path][method]

    @budget(10)
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case: Any) -> None:
        body = case.body
        if isinstance(body, dict):
            # Generate one token: the text does not matter here.
            budget_fields: tuple[str, ...] = ("max_tokens", "max_completion_tokens")
            if path == "/v1/responses":
                budget_fields = ("max_output_tokens",)
            if all(
                type(body.get(name, 1)) is int and body.get(name, 1) > 0 for name in budget_fields
            ):
                body |= {name: 1 for name in budget_fields if name in body} or {budget_fields[0]: 1}
            if mode is GenerationMode.POSITIVE:
                body.pop("model", None)
        response = case.call()
        # A schema cannot express the limit of a body's bytes, token limits or the chat template's rules.
        if response.status_code != HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
            case.validate_response(response, excluded_checks=[positive_data_acceptance])

    check()
    served.wait_idle()


@pytest.mark.parametrize(
    ("path", "cls", "needed"),
    [
        ("/v1/completions", CompletionRequest, {"prompt": "a"}),
        (
            "/v1/chat/completions",
            ChatRequest,
            {"messages": [{"role": "user", "content": "a"}]},
        ),
        ("/v1/responses", ResponsesBody, {"input": "a"}),
        (
            "/v1/messages",
            MessagesBody,
            {"max_tokens": 1, "messages": [{"role": "user", "content": "a"}]},
        ),
        (
            "/v1/messages/count_tokens",
            CountBody,
            {"messages": [{"role": "user", "content": "a"}]},
        ),
        ("/tokenize", TokenizeRequest, {"prompt": "a"}),
        ("/detokenize", DetokenizeRequest, {"tokens": [1]}),
    ],
)
def test_schema_and_server_agree_on_each_field(
    served: Box, path: str, cls: Any, needed: dict[str, Any]
) -> None:
    """Each field alone with each kind of value: the server accepts exactly what the schema allows.

    The schema does not say that a field needs another one.
    """
    import jsonschema_rs

    document = served.http.get("/openapi.json").json()
    reference = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    allowed = jsonschema_rs.validator_for(
        {"$ref": reference["schema"]["$ref"], "components": document["components"]}
    )
    assert reference["schema"]["$ref"].rpartition("/")[2] == cls.__name__
    values = (
        None,
        True,
        False,
        0,
        1,
        2,
        -1,
        0.5,
        "",
        "a",
        "none",
        [],
        ["a"],
        [1],
        [[1]],
        {},
        {"a": 1},
    )
    verdicts = []
    dependent = {"best_of", "stream_options", "top_logprobs"}
    if cls is TokenizeRequest:
        dependent |= {"messages", "prompt"}
    properties = document["components"]["schemas"][cls.__name__]["properties"].keys()
    for field in sorted({*properties, "unknown"} - dependent):
        for value in values:
            body = needed | {field: value}
            verdicts.append(takes(cls, body))
            assert verdicts[-1] == allowed.is_valid(body), (field, value)
    assert verdicts.count(True) > 20
    assert verdicts.count(False) > 20


def takes(cls: Any, body: dict[str, Any]) -> bool:
    try:
        parse(cls, body)
    except ApiError:
        return False
    return True
