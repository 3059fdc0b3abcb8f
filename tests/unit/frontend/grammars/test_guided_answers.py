"""Answers of a model with random scores follow their grammars."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from attention_client.generation.guide import Guide, restrict
from attention_client.generation.sampling import SequenceSampler
from byte_tokenizer import byte_tokenizer
from eaas.generation.errors import ApiError
from eaas.generation.sampling import Sampling
from eaas.generation.work import Work
from frontend.grammars.compiler import GrammarCompiler
from guided import compiled, part, random_answer

TOKENIZER = byte_tokenizer("<unk>", "</s>", eos_token="</s>")
END, VOCABULARY = 257, 260  # two ids have no token


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(TOKENIZER, VOCABULARY, [END])
    yield compiler
    compiler.close()


LEAVES = st.sampled_from(
    [
        {"type": "integer", "minimum": -9, "maximum": 99},
        {"type": "string", "maxLength": 6},
        {"type": "string", "pattern": "^[a-c]{1,4}$"},
        {"type": "boolean"},
        {"type": "null"},
        {"enum": ["x", 5, None]},
        {"const": {"a": [1]}},
    ]
)
NAMES = st.sampled_from(["a", "b", 'q"uote', "ü"])


def _object(properties: dict[str, Any], required: bool) -> dict[str, Any]:
    fields = {"type": "object", "properties": properties, "additionalProperties": False}
    return fields | ({"required": list(properties)} if required else {})


SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: (
        st.builds(_object, st.dictionaries(NAMES, inner, max_size=3), st.booleans())
        | st.builds(lambda items: {"type": "array", "items": items, "maxItems": 2}, inner)
        | st.builds(lambda some: {"anyOf": some}, st.lists(inner, min_size=1, max_size=3))
    ),
    max_leaves=5,
)


@settings(max_examples=20)
@given(SCHEMAS, st.integers(0, 2**31), st.booleans())
def test_an_answer_follows_a_random_schema(
    compiler: GrammarCompiler, schema: dict[str, Any], seed: int, evict: bool
) -> None:
    grammar = compiled(compiler, part("json", json.dumps(schema)))
    answer = random_answer(grammar, VOCABULARY, seed, most=2000, evict=evict)
    assert answer is not None
    jsonschema.validate(json.loads(TOKENIZER.decode(answer)), schema)


def test_json_has_the_white_space_of_usual_printers(compiler: GrammarCompiler) -> None:
    grammar = compiled(compiler, part("json", "{}"))

    def follows(text: str) -> bool:
        tokens, matcher = TOKENIZER(text)["input_ids"], grammar.start.deep_copy()
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    value = {"a": [1, {"b": [{"c": None}], "d": {}}], "e": "  \n\n"}
    for indent in (None, 0, 2, 4, "\t"):
        assert follows(json.dumps(value, indent=indent))
    assert follows(json.dumps(value, separators=(",", ":")))
    assert follows('{ "a" : [ 1 , 2 ] }')
    for text in ('{  "a": 1}', '{\t"a": 1}', '{\n\n"a": 1}', '{"a": 1\n' + 21 * " " + "}", "1 "):
        assert not follows(text)


@pytest.mark.parametrize(
    ("kind", "text", "pattern"),
    [
        ("regex", r"[a-c]{2}/\d", r"[a-c]{2}/\d"),
        ("lark", 'start: "yes" | "né😀\\n\\""', 'yes|né😀\n"'),
        ("grammar", 'start: A "-" A\nA: /[xy]{1,3}/', "[xy]{1,3}-[xy]{1,3}"),
        ("grammar", 'root ::= "ab" [0-9] [0-9]', "ab[0-9][0-9]"),
    ],
)
def test_every_kind_of_grammar(
    compiler: GrammarCompiler, kind: str, text: str, pattern: str
) -> None:
    grammar = compiled(compiler, part(kind, text))
    for seed in range(8):
        plain = random_answer(grammar, VOCABULARY, seed)
        assert plain is not None
        assert re.fullmatch(pattern, TOKENIZER.decode(plain))
        assert random_answer(grammar, VOCABULARY, seed, evict=True) == plain


def test_the_end_waits_for_the_least_length_unless_nothing_else_may_follow(
    compiler: GrammarCompiler,
) -> None:
    guide = Guide(compiled(compiler, part("regex", "a{1,4}")), prompt_length=10, min_length=13)
    a = TOKENIZER("a")["input_ids"]
    followers = [np.flatnonzero(guide.allowed(tokens)).tolist() for tokens in ([], a, a, a, a)]
    assert followers == [a, a, a, [*a, END], [END]]
    short = Guide(compiled(compiler, part("regex", "a")), prompt_length=10, min_length=20)
    assert np.flatnonzero(short.allowed(a)).tolist() == [END]


def test_scores_beyond_the_tokenizer_are_banned() -> None:
    scores_V = torch.zeros(6)
    restrict(scores_V, np.array([True, False, True]))
    assert torch.isfinite(scores_V).tolist() == [True, False, True, False, False, False]


def test_the_sequential_sampler_follows_too(compiler: GrammarCompiler) -> None:
    grammar = compiled(compiler, part("regex", "[ab]{3}"))
    tokens = [7, 8]
    sampler = SequenceSampler(Work("a", tokens, 2, 9, (END,), Sampling(grammar=grammar)))
    while tokens[-1] != END:
        scores_1V = torch.arange(VOCABULARY, dtype=torch.float32)[None]
        tokens.append(int(sampler(torch.tensor([tokens]), scores_1V).argmax()))
    assert TOKENIZER.decode(tokens[2:-1]) == "bbb"


RULES = "\n".join(f'r{i}: "a" r{(i + 1) % 2000} | r{i} "b"' for i in range(2000))
ANY = "".join(f"a{i}: a{i + 1} a{i + 1} | a{i + 1}\n" for i in range(60))


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        ("json", '{"type": "objekt"}', "Invalid type: objekt"),
        ("json", '{"$ref": "http://127.0.0.1:1/x"}', "does not fetch"),
        ("json", '{"$ref": "#"}', "no answer|NoExtension"),
        ("json", '{"anyOf": []}', "Unsatisfiable"),
        ("json", '{"not": {}}', "Unimplemented"),
        ("json", '{"items":' * 500 + "{}" + "}" * 500, "recursion limit"),
        # The whole time that a check may take.
        pytest.param(
            *("json", '{"type": "integer", "multipleOf": 999983}', "too complex"),
            marks=pytest.mark.nightly,
        ),
        ("regex", "(", "unclosed group"),
        ("regex", "(?=x)", "look-ahead"),
        ("regex", "(" * 2000 + "a" + ")" * 2000, "nest|deep|exceed"),
        ("grammar", "start: (", "."),
        ("grammar", "nonsense", "neither Lark nor GBNF"),
        ("grammar", "root ::= " + "(" * 900 + '"a"' + ")" * 900, "neither Lark nor GBNF"),
        ("grammar", "start: " + "(" * 5000 + '"a"' + ")" * 5000, "too deeply nested"),
        # Overflows llguidance's stack: its process ends.
        ("grammar", f"start: r0\n{RULES}", "too complex"),
    ],
)
def test_a_bad_grammar_is_refused_by_its_field(
    compiler: GrammarCompiler, kind: str, text: str, reason: str
) -> None:
    with pytest.raises(ApiError, match=reason) as caught:
        compiled(compiler, part(kind, text), "guided_x")
    assert (caught.value.status, caught.value.param) == (400, "guided_x")
    assert caught.value.message.startswith("'guided_x': ")


@pytest.mark.parametrize(
    ("kind", "text"),
    [("regex", r"(\p{L}|\d|\w){1,1000}" * 50), ("grammar", f'start: a0\n{ANY}a60: "x"?')],
)
def test_a_grammar_that_grows_too_large_ends_its_request(
    compiler: GrammarCompiler, kind: str, text: str
) -> None:
    guide = Guide(compiled(compiler, part(kind, text), "guided_x"), 0, 10_000)

    def follow() -> None:
        tokens: list[int] = []
        for _ in range(200):
            tokens = np.flatnonzero(guide.allowed(tokens)).tolist()[-1:]

    with pytest.raises(ApiError, match="cannot follow it") as caught:
        follow()
    assert (caught.value.status, caught.value.param) == (400, "guided_x")


def test_recent_grammars_are_kept(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled(compiler, part("regex", "kept"))

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("checked again")

    monkeypatch.setattr("frontend.grammars.compiler.subprocess.run", fail)
    compiled(compiler, part("regex", "kept"))
    with pytest.raises(AssertionError, match="checked again"):
        compiled(compiler, part("regex", "new"))


def test_a_check_that_cannot_start_or_says_nothing(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = "frontend.grammars.compiler.subprocess.run"

    def fail(*_: Any, **__: Any) -> None:
        raise BlockingIOError

    monkeypatch.setattr(run, fail)
    with pytest.raises(ApiError, match="Try again") as caught:
        compiled(compiler, part("regex", "x"))
    assert caught.value.status == 503
    monkeypatch.setattr(run, lambda *_, **__: SimpleNamespace(stdout=b""))
    with pytest.raises(ApiError, match="too complex"):
        compiled(compiler, part("regex", "x"))


def test_models_without_end_tokens_or_fast_tokenizers_take_no_grammars() -> None:
    for tokenizer, ends, reason in (
        (TOKENIZER, [], "no end token"),
        ({"not": "fast"}, [END], "tokenizer takes no grammars"),
    ):
        with pytest.raises(ApiError, match=reason) as caught:
            compiled(GrammarCompiler(tokenizer, VOCABULARY, ends), part("regex", "a"), "guided_x")
        assert caught.value.param == "guided_x"


NAMES_A_TOKEN = [
    ("lark", 'start: "<|eos|>x" | "a <|user|> b"', {"<|eos|>x", "a <|user|> b"}),
    ("lark", 'start: "a" "<tool" "_call>"', {"a<tool_call>"}),
    ("json", '{"const": "<tool_call>"}', {'"<tool_call>"'}),
    ("json", '{"enum": ["</s>", "<|eos|>"]}', {'"</s>"', '"<|eos|>"'}),
    ("regex", r"<\|eos\|>[ab]", {"<|eos|>a", "<|eos|>b"}),
    ("grammar", 'root ::= "<tool_call>" [ab]', {"<tool_call>a", "<tool_call>b"}),
]


@pytest.mark.parametrize(("kind", "text", "answers"), NAMES_A_TOKEN)
def test_the_name_of_a_special_token_is_spelled(kind: str, text: str, answers: set[str]) -> None:
    tokenizer = byte_tokenizer("<unk>", "</s>", eos_token="</s>")
    tokenizer.add_tokens([AddedToken("<tool_call>"), AddedToken("<|eos|>", special=True)])
    compiler = GrammarCompiler(tokenizer, len(tokenizer), [END])
    grammar = compiled(compiler, part(kind, text))
    for seed in range(8):
        tokens = random_answer(grammar, len(tokenizer), seed)
        assert tokens is not None
        assert max(tokens) < 256
        assert tokenizer.decode(tokens) in answers
    compiler.close()
