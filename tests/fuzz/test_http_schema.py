"""The endpoint's schema is true: schemathesis sends what it allows, and what it does not."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import pytest
import schemathesis
import torch
from hypothesis import given
from schemathesis.checks import load_all_checks
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

from http_box import Box

pytestmark = pytest.mark.integration

OPERATIONS = (
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{name}"),
    ("GET", "/eaas/v1/status"),
    ("GET", "/health"),
    ("GET", "/metrics"),
)


# Another model; more tokens than fit, none, or one that is no token of the model.
BEYOND_A_SCHEMA = (
    "model",
    "prompt",
    "messages",
    "max_tokens",
    "max_completion_tokens",
    "min_tokens",
)


@pytest.fixture(scope="module")
def served() -> Iterator[Box]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    box = Box()
    yield box
    box.close()
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
        if method in ("get", "post")
    }
    assert paths == set(OPERATIONS)
    routes = {r.path.replace(":path", "") for r in served.app.router.routes}
    assert routes == {path for _, path in OPERATIONS} | {"/openapi.json"}


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_the_schema_is_true(
    schema: Any,
    served: Box,
    budget: Callable[..., hypothesis.settings],
    method: str,
    path: str,
    mode: GenerationMode,
) -> None:
    operation = schema[path][method]
    if mode is GenerationMode.NEGATIVE and method == "GET":
        pytest.skip("there is nothing to get wrong")

    @budget(10)
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case: Any) -> None:
        body = case.body
        if isinstance(body, dict):
            # What is to be generated is not the question here.
            budget_fields = ("max_tokens", "max_completion_tokens")
            if all(
                type(body.get(name, 1)) is int and body.get(name, 1) > 0 for name in budget_fields
            ):
                body |= {name: 1 for name in budget_fields if name in body} or {"max_tokens": 1}
            if mode is GenerationMode.POSITIVE:
                body.pop("model", None)
        # A schema cannot say what has too many tokens, or what the chat template refuses.
        case.call_and_validate(excluded_checks=[positive_data_acceptance])

    check()
    served.wait_idle()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_what_schema_and_server_say_of_the_same_field(served: Box, path: str) -> None:
    """Each field alone with each kind of value: what the server takes, the schema allows."""
    import jsonschema_rs

    document = served.http.get("/openapi.json").json()
    reference = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    allowed = jsonschema_rs.validator_for(
        {"$ref": reference["schema"]["$ref"], "components": document["components"]}
    )
    needed = (
        {"prompt": "a"}
        if path == "/v1/completions"
        else {"messages": [{"role": "user", "content": "a"}]}
    )
    name = reference["schema"]["$ref"].rpartition("/")[2]
    fields = document["components"]["schemas"][name]["properties"]
    values = (None, True, False, 0, 1, 2, -1, 0.5, "", "a", "none", [], ["a"], [1], {}, {"a": 1})
    taken = 0
    for field in (*fields, "unknown"):
        for value in values:
            body = needed | {"max_tokens": 1} | {field: value}
            answer = served.http.post(
                path, content=json.dumps(body), headers={"Content-Type": "application/json"}
            )
            if answer.status_code == 200:
                taken += 1
                assert allowed.is_valid(body), (field, value)
            elif allowed.is_valid(body):
                reason = answer.json()["error"]
                assert field in BEYOND_A_SCHEMA, (field, value, reason)
                assert reason["param"] == field
            else:
                assert answer.status_code == 400, answer.text
    assert taken > len(fields)
