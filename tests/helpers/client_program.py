"""A program that uses an endpoint through a client that others made: CLIENT URL ...

It runs in an environment of the client's own, so it imports nothing of the project. Its status is 77 where
the client is not installed. Each client calls a tool and sends the result, streams, and asks for an object;
lm-eval evaluates.
"""

from __future__ import annotations

import asyncio
import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pydantic

MISSING = 77
MODEL = "demo"
QUESTION = "How is the weather in Bern?"
WEATHER = "Föhn, 18 C"
TOKENS = 200


class Person(pydantic.BaseModel):
    """A person."""

    name: str = pydantic.Field(max_length=6)
    age: int = pydantic.Field(ge=0, le=99)
    kind: Literal["a", "b"]

    model_config = pydantic.ConfigDict(extra="forbid")


class Place(pydantic.BaseModel):
    """Arguments of get_weather."""

    city: Literal["Bern", "Basel"]


TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city.",
        "parameters": Place.model_json_schema(),
    },
}


def run_openai(url: str) -> None:
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    chat = {"model": MODEL, "max_tokens": TOKENS, "temperature": 1.0, "seed": 1, "tools": [TOOL]}
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    create: Any = client.chat.completions.create
    answer = create(messages=messages, tool_choice="required", parallel_tool_calls=False, **chat)
    message = answer.choices[0].message
    (call,) = message.tool_calls
    assert Place.model_validate_json(call.function.arguments)
    messages.append(message.model_dump())
    messages.append({"role": "tool", "tool_call_id": call.id, "content": WEATHER})
    chat |= {"max_tokens": 9, "temperature": 0}
    for choice in ("auto", "none"):
        whole = create(messages=messages, tool_choice=choice, **chat).choices[0].message
        assert whole.content
        assert not whole.tool_calls
        parts = list(create(messages=messages, tool_choice=choice, stream=True, **chat))
        deltas = [part.choices[0].delta for part in parts if part.choices]
        assert "".join(delta.content or "" for delta in deltas) == whole.content
    chat |= {"max_tokens": TOKENS, "temperature": 1.0}
    with client.chat.completions.stream(
        messages=messages[:1], tool_choice="required", parallel_tool_calls=False, **chat
    ) as stream:
        final = stream.get_final_completion().choices[0].message
    assert Place.model_validate_json(final.tool_calls[0].function.arguments)
    chat.pop("tools")
    form: Any = {"messages": messages[:1], "response_format": Person} | chat
    parsed = client.chat.completions.parse(**form).choices[0].message.parsed
    assert isinstance(parsed, Person)
    with client.chat.completions.stream(**form) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == parsed


def run_langchain(url: str) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    fields: Any = {"model": MODEL, "base_url": f"{url}/v1", "api_key": "none", "max_retries": 0}
    chat = ChatOpenAI(**fields, temperature=1.0, seed=1, max_tokens=TOKENS)
    forced = chat.bind_tools([TOOL], tool_choice="any", parallel_tool_calls=False)
    messages: list[Any] = [HumanMessage(QUESTION)]
    messages.append(forced.invoke(messages))
    (call,) = messages[-1].tool_calls
    assert Place(**call["args"])
    messages.append(ToolMessage(WEATHER, tool_call_id=call["id"]))
    free = ChatOpenAI(**fields, temperature=0, max_tokens=9).bind_tools([TOOL])
    answer = free.invoke(messages)
    assert answer.content
    assert "".join(part.content for part in free.stream(messages)) == answer.content
    chunks = list(forced.stream(messages[:1]))
    assert not any(each.content for each in chunks)
    pieces = [piece["args"] or "" for each in chunks for piece in each.tool_call_chunks]
    assert Place.model_validate_json("".join(pieces))
    for method in ("json_schema", "function_calling"):
        model = chat.with_structured_output(Person, method=method)
        person = model.invoke(QUESTION)
        assert isinstance(person, Person)
        assert list(model.stream(QUESTION))[-1] == person


def run_litellm(url: str) -> None:
    import litellm

    base: Any = {"api_base": f"{url}/v1", "api_key": "none", "model": f"hosted_vllm/{MODEL}"}
    chat = base | {"tools": [TOOL], "max_tokens": TOKENS, "temperature": 1.0, "seed": 1}
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    forced = chat | {"tool_choice": "required", "parallel_tool_calls": False}
    message = litellm.completion(messages=messages, **forced).choices[0].message
    (call,) = message.tool_calls
    assert Place.model_validate_json(call.function.arguments)
    chunks = list(litellm.completion(messages=messages, stream=True, **forced))
    (built,) = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls
    assert Place.model_validate_json(built.function.arguments)
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": WEATHER}]
    chat |= {"max_tokens": 9, "temperature": 0}
    whole = litellm.completion(messages=messages, **chat).choices[0].message.content
    parts = litellm.completion(messages=messages, stream=True, **chat)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == whole
    schema = base | {"max_tokens": TOKENS, "temperature": 1.0, "seed": 1}
    form = {"messages": messages[:1], "response_format": Person} | schema
    answer = litellm.completion(**form).choices[0].message.content
    assert Person.model_validate_json(answer)
    parts = litellm.completion(stream=True, **form)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == answer


def run_pydantic_ai(url: str) -> None:
    from pydantic_ai import Agent, NativeOutput, ToolOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(f"{url}/v1", api_key="none"))
    settings: Any = {"max_tokens": TOKENS, "temperature": 1.0, "seed": 1}

    async def streamed_person(agent: Any) -> Any:
        async with agent.run_stream(QUESTION) as stream:
            return await stream.get_output()

    for output in (Person, ToolOutput(Person), NativeOutput(Person)):
        agent: Any = Agent(model, output_type=output, model_settings=settings, retries=3)
        person = agent.run_sync(QUESTION).output
        assert isinstance(person, Person)
        assert asyncio.run(streamed_person(agent)) == person
    called: list[str] = []

    def get_weather(city: Literal["Bern", "Basel"]) -> str:
        """Get the weather of a city."""
        called.append(city)
        return WEATHER

    # The model chooses between the tool and the output.
    for seed in range(8):
        agent = Agent(model, output_type=Person, tools=[get_weather], retries=3)
        fields = settings | {"seed": seed, "parallel_tool_calls": False}
        assert isinstance(agent.run_sync(QUESTION, model_settings=fields).output, Person)
        if called:
            break
    assert called
    agent = Agent(model, tools=[get_weather], model_settings={"max_tokens": 9, "temperature": 0})
    whole = agent.run_sync(QUESTION).output

    async def streamed() -> str:
        async with agent.run_stream(QUESTION) as stream:
            return "".join([part async for part in stream.stream_text(delta=True)])

    assert asyncio.run(streamed()) == whole


def run_llama_index(url: str) -> None:
    from llama_index.core.base.llms.types import ChatMessage
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike

    def get_weather(city: Literal["Bern", "Basel"]) -> str:
        """Get the weather of a city."""
        return WEATHER

    fields: Any = {
        "model": MODEL,
        "api_base": f"{url}/v1",
        "api_key": "none",
        "is_chat_model": True,
        "is_function_calling_model": True,
        "max_retries": 0,
    }
    llm = OpenAILike(**fields, max_tokens=TOKENS, temperature=1.0, additional_kwargs={"seed": 1})
    tool = FunctionTool.from_defaults(get_weather, fn_schema=Place)
    messages = [ChatMessage(role="user", content=QUESTION)]
    answer = llm.chat_with_tools([tool], chat_history=messages, tool_required=True)
    calls = llm.get_tool_calls_from_response(answer)
    assert {call.tool_name for call in calls} == {"get_weather"}
    forced = llm.stream_chat_with_tools([tool], chat_history=messages, tool_required=True)
    streamed = llm.get_tool_calls_from_response(list(forced)[-1])
    assert [each.tool_kwargs for each in streamed] == [each.tool_kwargs for each in calls]
    messages.append(answer.message)
    for call in calls:
        assert Place(**call.tool_kwargs)
        result = str(tool(**call.tool_kwargs))
        extra = {"tool_call_id": call.tool_id}
        messages.append(ChatMessage(role="tool", content=result, additional_kwargs=extra))
    free = OpenAILike(**fields, max_tokens=9, temperature=0)
    whole = free.chat_with_tools([tool], chat_history=messages).message.content
    assert whole
    stream = free.stream_chat_with_tools([tool], chat_history=messages)
    parts = [each.delta or "" for each in stream]
    assert "".join(parts) == whole
    person = llm.as_structured_llm(Person).chat(messages[:1]).raw
    assert isinstance(person, Person)


def run_anthropic(url: str) -> None:
    import anthropic

    client: Any = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    tool = {
        "name": "get_weather",
        "description": "Get the weather of a city.",
        "input_schema": Place.model_json_schema(),
    }
    sampling = {"temperature": 1.0}  # no argument of this client any more
    fields: Any = {"model": MODEL, "max_tokens": TOKENS, "tools": [tool], "extra_body": sampling}
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    forced = {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    answer = client.messages.create(messages=messages, **fields, **forced)
    assert answer.stop_reason == "tool_use"
    (use,) = [block for block in answer.content if block.type == "tool_use"]
    assert Place(**use.input)
    with client.messages.stream(messages=messages, **fields, **forced) as stream:
        final = stream.get_final_message()
    assert Place(**next(block for block in final.content if block.type == "tool_use").input)
    messages.append({"role": "assistant", "content": answer.content})
    result = {"type": "tool_result", "tool_use_id": use.id, "content": WEATHER}
    messages.append({"role": "user", "content": [result]})
    assert client.messages.count_tokens(model=MODEL, messages=messages, tools=[tool]).input_tokens
    fields |= {"max_tokens": 9, "extra_body": {"temperature": 0}}
    whole = client.messages.create(messages=messages, **fields)
    with client.messages.stream(messages=messages, **fields) as stream:
        text = "".join(stream.text_stream)
    assert text == "".join(block.text for block in whole.content if block.type == "text") != ""
    # Place, since the client drops limits of lengths and numbers.
    form: Any = {"messages": messages[:1], "output_format": Place, "extra_body": sampling}
    form |= {"model": MODEL, "max_tokens": TOKENS}
    assert isinstance(client.messages.parse(**form).parsed_output, Place)
    with client.messages.stream(**form) as stream:
        assert isinstance(stream.get_final_message().parsed_output, Place)


def run_lm_eval(url: str) -> None:
    import lm_eval
    import lm_eval.tasks

    task = {
        "task": "weather",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": "weather.jsonl"}},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{text}}",
        "doc_to_target": "x",
        "generation_kwargs": {"until": ["\n\n\n"], "max_gen_toks": 9, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    }
    questions = [QUESTION, "Anna", "stars"]
    lines = [json.dumps({"text": text}) for text in questions]
    Path("weather.jsonl").write_text("\n".join(lines))
    Path("weather.yaml").write_text(json.dumps(task))  # JSON is YAML
    result = lm_eval.simple_evaluate(
        model="local-chat-completions",
        model_args=f"model={MODEL},base_url={url}/v1/chat/completions",
        tasks=["weather"],
        task_manager=lm_eval.tasks.TaskManager(include_path=".", include_defaults=False),
        apply_chat_template=True,
        log_samples=True,
    )
    found = {each["doc"]["text"]: each["resps"][0][0] for each in result["samples"]["weather"]}
    assert found.keys() == set(questions)
    assert all(found.values())


CLIENTS: dict[str, Callable[[str], None]] = {
    "openai": run_openai,
    "langchain": run_langchain,
    "litellm": run_litellm,
    "pydantic_ai": run_pydantic_ai,
    "llama_index": run_llama_index,
    "anthropic": run_anthropic,
    "lm_eval": run_lm_eval,
}


def main(client: str, *servers: str) -> int:
    """Use each server, NAME=URL; print the failures as JSON."""
    failures = {}
    for server in servers:
        name, _, url = server.partition("=")
        try:
            CLIENTS[client](url)
        except ModuleNotFoundError as error:
            print(error, file=sys.stderr)
            return MISSING
        except Exception:  # noqa: BLE001 - any failure is reported
            failures[name] = traceback.format_exc(limit=-4)
    print(json.dumps(failures))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
