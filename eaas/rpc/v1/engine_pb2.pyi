from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FromFrontend(_message.Message):
    __slots__ = ("hello", "submit", "cancel", "alive")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    submit: Submit
    cancel: int
    alive: Alive
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., submit: _Optional[_Union[Submit, _Mapping]] = ..., cancel: _Optional[int] = ..., alive: _Optional[_Union[Alive, _Mapping]] = ...) -> None: ...

class FromEngine(_message.Message):
    __slots__ = ("info", "deliveries", "load", "drain")
    INFO_FIELD_NUMBER: _ClassVar[int]
    DELIVERIES_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    info: EngineInfo
    deliveries: Deliveries
    load: Load
    drain: Drain
    def __init__(self, info: _Optional[_Union[EngineInfo, _Mapping]] = ..., deliveries: _Optional[_Union[Deliveries, _Mapping]] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., drain: _Optional[_Union[Drain, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol_version", "frontend", "secret")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    FRONTEND_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    frontend: str
    secret: str
    def __init__(self, protocol_version: _Optional[int] = ..., frontend: _Optional[str] = ..., secret: _Optional[str] = ...) -> None: ...

class EngineInfo(_message.Message):
    __slots__ = ("protocol_version", "client_digest", "kind", "capacity", "refusal")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    CLIENT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    client_digest: str
    kind: _containers.RepeatedScalarFieldContainer[str]
    capacity: int
    refusal: str
    def __init__(self, protocol_version: _Optional[int] = ..., client_digest: _Optional[str] = ..., kind: _Optional[_Iterable[str]] = ..., capacity: _Optional[int] = ..., refusal: _Optional[str] = ...) -> None: ...

class Alive(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Drain(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Load(_message.Message):
    __slots__ = ("running", "waiting", "cache_usage", "compiled", "missing", "failovers")
    class FailoversEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    CACHE_USAGE_FIELD_NUMBER: _ClassVar[int]
    COMPILED_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    FAILOVERS_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    cache_usage: float
    compiled: bool
    missing: str
    failovers: _containers.ScalarMap[str, int]
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., cache_usage: _Optional[float] = ..., compiled: _Optional[bool] = ..., missing: _Optional[str] = ..., failovers: _Optional[_Mapping[str, int]] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("attempt", "tokens", "prompt_length", "max_tokens", "end_tokens", "sampling", "servers", "trace")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    END_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    attempt: int
    tokens: bytes
    prompt_length: int
    max_tokens: int
    end_tokens: _containers.RepeatedScalarFieldContainer[int]
    sampling: SamplingSettings
    servers: bool
    trace: bytes
    def __init__(self, attempt: _Optional[int] = ..., tokens: _Optional[bytes] = ..., prompt_length: _Optional[int] = ..., max_tokens: _Optional[int] = ..., end_tokens: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[SamplingSettings, _Mapping]] = ..., servers: _Optional[bool] = ..., trace: _Optional[bytes] = ...) -> None: ...

class SamplingSettings(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "seed", "min_tokens", "end_tokens", "presence_penalty", "frequency_penalty", "repetition_penalty", "bias_tokens", "biases", "logprobs", "prompt_logprobs", "grammar", "allowed_tokens", "bad_words")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    END_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    BIAS_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BIASES_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: str
    min_tokens: int
    end_tokens: _containers.RepeatedScalarFieldContainer[int]
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    bias_tokens: _containers.RepeatedScalarFieldContainer[int]
    biases: _containers.RepeatedScalarFieldContainer[float]
    logprobs: int
    prompt_logprobs: bool
    grammar: Grammar
    allowed_tokens: TokenList
    bad_words: _containers.RepeatedCompositeFieldContainer[TokenList]
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., seed: _Optional[str] = ..., min_tokens: _Optional[int] = ..., end_tokens: _Optional[_Iterable[int]] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., bias_tokens: _Optional[_Iterable[int]] = ..., biases: _Optional[_Iterable[float]] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[bool] = ..., grammar: _Optional[_Union[Grammar, _Mapping]] = ..., allowed_tokens: _Optional[_Union[TokenList, _Mapping]] = ..., bad_words: _Optional[_Iterable[_Union[TokenList, _Mapping]]] = ...) -> None: ...

class TokenList(_message.Message):
    __slots__ = ("tokens",)
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, tokens: _Optional[_Iterable[int]] = ...) -> None: ...

class Grammar(_message.Message):
    __slots__ = ("text", "end_tokens", "field")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    END_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    text: str
    end_tokens: _containers.RepeatedScalarFieldContainer[int]
    field: str
    def __init__(self, text: _Optional[str] = ..., end_tokens: _Optional[_Iterable[int]] = ..., field: _Optional[str] = ...) -> None: ...

class Deliveries(_message.Message):
    __slots__ = ("attempts", "tokens", "others", "begun")
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    OTHERS_FIELD_NUMBER: _ClassVar[int]
    BEGUN_FIELD_NUMBER: _ClassVar[int]
    attempts: _containers.RepeatedScalarFieldContainer[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    others: _containers.RepeatedCompositeFieldContainer[Delivered]
    begun: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, attempts: _Optional[_Iterable[int]] = ..., tokens: _Optional[_Iterable[int]] = ..., others: _Optional[_Iterable[_Union[Delivered, _Mapping]]] = ..., begun: _Optional[_Iterable[int]] = ...) -> None: ...

class Delivered(_message.Message):
    __slots__ = ("attempt", "tokens", "finished", "failure", "servers", "scores", "prompt_scores")
    class ServersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_SCORES_FIELD_NUMBER: _ClassVar[int]
    attempt: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    finished: bool
    failure: Failure
    servers: _containers.ScalarMap[str, int]
    scores: TokenScores
    prompt_scores: TokenScores
    def __init__(self, attempt: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., finished: _Optional[bool] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ..., servers: _Optional[_Mapping[str, int]] = ..., scores: _Optional[_Union[TokenScores, _Mapping]] = ..., prompt_scores: _Optional[_Union[TokenScores, _Mapping]] = ...) -> None: ...

class TokenScores(_message.Message):
    __slots__ = ("logprobs", "top_tokens", "top_logprobs")
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    logprobs: bytes
    top_tokens: bytes
    top_logprobs: bytes
    def __init__(self, logprobs: _Optional[bytes] = ..., top_tokens: _Optional[bytes] = ..., top_logprobs: _Optional[bytes] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("status", "message", "type", "param", "code", "stopped")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    PARAM_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    STOPPED_FIELD_NUMBER: _ClassVar[int]
    status: int
    message: str
    type: str
    param: str
    code: str
    stopped: bool
    def __init__(self, status: _Optional[int] = ..., message: _Optional[str] = ..., type: _Optional[str] = ..., param: _Optional[str] = ..., code: _Optional[str] = ..., stopped: _Optional[bool] = ...) -> None: ...
