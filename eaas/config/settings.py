"""Settings of each role, of `cluster.yaml`; environment variables override the file.

A section of the file is a role (`expert_server:`), each line in it is a field. The variable of a field joins
both with two underscores: `EAAS_EXPERT_SERVER__THREADS=2`. Unknown keys are errors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    YamlConfigSettingsSource,
)

from eaas.config.explanations import BETWEEN, PREFIX
from eaas.errors import ConfigError
from eaas.hub_cache import model_name
from eaas.transports import AUTO, known

__all__ = [
    "GPU_NUMBER",
    "HOLD_BACK_S",
    "AttentionClientConfig",
    "AutoscalerConfig",
    "BalancerConfig",
    "ClusterConfig",
    "ExpertServerConfig",
    "FrontendConfig",
    "MonitorConfig",
    "RayConfig",
    "SchedulerConfig",
    "SecurityConfig",
    "TelemetryConfig",
]

GPU_NUMBER = "(0|[1-9][0-9]{0,2})"
"""Pattern of N in the device cuda:N."""

HOLD_BACK_S = 5.0
"""Longest time an attention client uses the old placement while it connects to servers of the new one.

The balancer keeps moved experts in place for longer than this (`ack_timeout_s` of the planner).
"""

Seconds = Annotated[float, Field(gt=0, le=86_400)]
Port = Annotated[int, Field(ge=0, le=65_535)]


def _on_off(value: object) -> object:
    """Map booleans to "on" and "off", because YAML reads a bare on or off as a boolean."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


def _transport(name: str) -> str:
    """Check the name of a transport."""
    if name != AUTO:
        try:
            known(name)
        except ConfigError as error:
            raise ValueError(str(error)) from error
    return name


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class _Role(_Section):
    """A role with a gRPC server."""

    host: str = Field(
        "127.0.0.1", description="Address to listen on; 0.0.0.0 for members on other machines."
    )
    port: Port = Field(
        0,
        description="gRPC port; 0 picks a free port. Set one for a monitor that may restart, since "
        "members reconnect to its address; keep 0 for servers on one machine that share this file.",
    )
    health_port: Port = Field(
        0, description="Port for HTTP probes (/health, /live), without TLS; 0 disables it."
    )


class SecurityConfig(_Section):
    """Authentication and exposure to other machines."""

    tls_dir: str = Field(
        "",
        description="Directory with ca.pem, ROLE.pem and ROLE.key (`eaas certs`). Empty: no TLS, and "
        "processes listen on loopback only.",
    )
    insecure: bool = Field(
        False,
        description="Let other machines connect without TLS and use the endpoint without an API key.",
    )


class MonitorConfig(_Role):
    """The monitor: cluster membership."""

    lease_s: Seconds = Field(
        2.0,
        description="A member is marked DEAD after this long without a heartbeat, and SUSPECT before.",
    )
    heartbeat_s: Seconds = Field(
        0.9, description="Heartbeat interval of members; less than half of lease_s."
    )
    stop_members_on_exit: bool = Field(
        False, description="Stop all members when the monitor stops (for a local cluster)."
    )
    store: Literal["embedded", "zookeeper"] = Field(
        "embedded",
        description="Where the monitor keeps its state: embedded, a file in data_dir; or zookeeper, "
        "for several monitors with one leader. Members get all addresses: --join "
        "HOST:PORT,HOST:PORT.",
    )
    data_dir: str = Field(
        "",
        description="Directory of the embedded store, for this monitor only. Empty keeps the state in"
        " memory.",
    )
    zookeeper_hosts: str = Field(
        "127.0.0.1:2181", min_length=1, description="ZooKeeper servers, HOST:PORT,HOST:PORT."
    )
    zookeeper_root: str = Field(
        "/eaas",
        pattern=r"^(/[A-Za-z0-9_-]+)+$",
        description="Path in ZooKeeper, unique to the cluster.",
    )
    zookeeper_session_s: Seconds = Field(
        4.0,
        description="Another monitor takes over after this long; ZooKeeper allows 2 to 20 of its "
        "ticks (4 to 40 s by default).",
    )


class BalancerConfig(_Role):
    """The balancer: placement of experts on servers."""

    expected_servers: int = Field(
        3, ge=1, description="Number of expert servers to wait for before the first placement."
    )
    redundancy: int = Field(
        2, ge=1, description="Number of servers that hold each expert; at most expected_servers."
    )
    max_servers: int = Field(
        64,
        ge=1,
        le=16_384,
        description="Upper limit of expert servers for `eaas scale`, the dashboard and the "
        "autoscaler, which has a lower limit of its own.",
    )
    apply_timeout_s: Seconds = Field(
        300.0, description="Longest time for a server to load its experts."
    )
    dead_grace_s: Seconds = Field(
        30.0, description="Wait for a dead server's return before its experts move elsewhere."
    )

    policy: str = Field(
        "spread",
        min_length=1,
        description="Placement policy. spread ignores load, so nothing moves by itself; fractional "
        "follows it. Others: docs/policies.md.",
    )
    num_redundant_experts: int = Field(
        0,
        ge=0,
        le=100_000,
        description="Extra replicas per layer for load balancing, in addition to redundancy. The "
        "number of servers is enough to balance any load.",
    )
    step_s: Seconds = Field(
        1.0,
        description="Interval between load readings (a step of the window); up to 8 times longer "
        "while idle.",
    )
    window_size: int = Field(
        120, ge=2, le=100_000, description="Steps of load history used for a plan."
    )
    step_interval: int = Field(
        60,
        ge=1,
        le=1_000_000,
        description="Steps between two plans; steps without tokens do not count.",
    )
    speeds: Literal["measured", "stated"] = Field(
        "measured",
        description="Source of server speeds: measured, or expert_server.speed (stated).",
    )
    knobs: Literal["static", "live"] = Field(
        "static",
        description="ScalpeLB's k, budget, drift_tol and heavy_frac: its defaults (static), or set "
        "from burstiness, link load and autoscaler.latency_target_ms (live).",
    )
    log_balancedness: bool = Field(
        False, description="Log balancedness (mean / max server load) after each step."
    )
    use_async: bool = Field(
        True,
        description="Plan in the background; false makes roll-outs and membership changes wait for plans.",
    )
    spare_slots: bool = Field(
        False,
        description="One spare slot per layer on each server; its replica follows the last steps' "
        "load. Costs memory for one expert per layer on each server.",
    )
    link_bytes_per_s: int = Field(
        1_000_000_000,
        ge=1_000,
        description="Rate at which servers load experts, used to weigh the cost of moves.",
    )
    node_budget: int = Field(
        -1,
        ge=-1,
        le=100_000,
        description="Most replicas per layer outside the first node (expert_server.node) of their "
        "expert; needs policy fractional. -1: no limit.",
    )
    metrics_port: Port = Field(0, description="Port for Prometheus metrics; 0 disables it.")


class AutoscalerConfig(_Section):
    """The autoscaler (`eaas autoscale`): number of expert servers."""

    target_utilization: float = Field(
        0.6, ge=0.05, le=0.8, description="Target share of time that servers are busy."
    )
    latency_target_ms: float = Field(
        0.0,
        ge=0,
        le=60_000,
        description="Add servers while the mean time between two tokens, as the endpoints measure it,"
        " exceeds this; 0: utilisation only.",
    )
    min_servers: int = Field(
        1, ge=1, description="Lower limit of servers; the balancer's redundancy is another."
    )
    max_servers: int = Field(8, ge=1, description="Upper limit of servers.")
    interval_s: Seconds = Field(15.0, description="Interval between measurements.")
    cooldown_s: Seconds = Field(
        60.0, description="Minimum time between two changes, of one server each."
    )
    scale_in_window_s: Seconds = Field(
        300.0, description="A server is removed after it has been unneeded for this long."
    )


class ExpertServerConfig(_Role):
    """An expert server: computes its share of the experts."""

    threads: int = Field(
        0,
        ge=0,
        description="Compute threads. 0: `eaas up` divides the cores among the servers, and a server "
        "started by hand takes half of them.",
    )
    core: int = Field(-1, ge=-1, description="Core that the serving loop is bound to; -1: any.")
    device: str = Field(
        "cpu",
        pattern=rf"^(cpu|cuda(:{GPU_NUMBER})?)$",
        description="Device that holds the experts and computes: cpu, cuda (torch's current GPU) or "
        "cuda:N. `eaas up --devices` sets it for each server.",
    )
    kernel: Literal["auto", "native", "reference", "triton"] = Field(
        "auto",
        description="Compute kernel; auto: triton on a GPU, else native, or reference if native cannot serve "
        "the model.",
    )
    quantization: Literal["none", "int8", "int4"] = Field(
        "none",
        description="int8 or int4: weights take half or a quarter of bfloat16's memory, and "
        "activations keep at least 15 bits. The server logs the loss of accuracy at its "
        "start.",
    )
    slots: int = Field(
        16, ge=2, le=4096, description="Number of slots in the arena, for all clients."
    )
    slot_tokens: int = Field(
        4096,
        ge=1,
        le=65_536,
        description="Most tokens of a slot; each has memory for the steps of its client.",
    )
    batching: Literal["immediate", "window", "all"] = Field(
        "window",
        description="What a batch waits for: immediate, nothing; window, other clients' requests for "
        "the layer, where measurements show a gain; all, every active client (the paper's"
        " mode).",
    )
    batch_window_us: int = Field(
        1000,
        ge=0,
        le=1_000_000,
        description="Longest wait of a batch, in microseconds. Mode all needs more than a client's "
        "pause between two calls.",
    )
    memory_bytes: int = Field(
        0,
        ge=0,
        description="Memory for expert weights; the balancer respects it, also during changes of "
        "placement. 0 means no limit, on a GPU what is free there.",
    )
    node: str = Field(
        "",
        description="Name of this server's machine, as NODE or RACK/NODE. Empty: the host name. Replicas of "
        "an expert go to different nodes, then to different racks.",
    )
    speed: float = Field(
        1.0, gt=0, le=1000, description="Relative speed of this server, used until it is measured."
    )
    load_bytes_per_s: int = Field(
        0,
        ge=0,
        description="Limit for loading experts while requests are served; 0 means no limit.",
    )
    drain_timeout_s: Seconds = Field(
        60.0, description="Longest wait of a draining server for others to take over its experts."
    )
    share_bytes_per_s: int = Field(
        500_000_000,
        ge=1_000_000,
        description="Limit for sending the checkpoint to servers without one, in total.",
    )
    added_latency_us: int = Field(
        0,
        ge=0,
        le=10_000_000,
        description="Artificial delay of each request, for experiments, in microseconds. The server "
        "stays free meanwhile.",
    )


class SchedulerConfig(_Section):
    """The scheduler: choice of the waiting requests that run together."""

    strategy: str = Field(
        "fcfs",
        min_length=1,
        description="Batch-selection strategy (docs/scheduling.md); fcfs is first come, first served.",
    )
    batch_size: int = Field(
        32,
        ge=1,
        le=1024,
        description="Upper limit of requests that run together, and size of each chosen group.",
    )
    window_size: int = Field(
        128, ge=1, le=4096, description="Number of oldest waiting requests to choose from."
    )
    record: str = Field(
        "",
        description="File for the queue's history (`python -m benchmarks.caps replay`). Empty disables it.",
    )

    @model_validator(mode="after")
    def _window_holds_a_batch(self) -> Self:
        if self.window_size < self.batch_size:
            raise ValueError(
                f"window_size {self.window_size} is below batch_size {self.batch_size}"
            )
        return self


class FrontendConfig(_Section):
    """A frontend: the HTTP endpoint, in front of the engines of attention clients, or vLLM's."""

    host: str = Field("127.0.0.1", description="Address of the HTTP endpoint.")
    port: Port = Field(8000, description="Port of the HTTP endpoint; 0 picks a free port.")
    api_key_file: str = Field(
        "",
        description="File with one API key per line; requests send one as a bearer token. Empty: the "
        "key in EAAS_API_KEY, or no key.",
    )
    allowed_hosts: list[str] = Field(
        [],
        description="Further names allowed in Host and Origin while host is loopback, such as the "
        "name of a proxy on this machine.",
    )
    allowed_origins: list[Annotated[str, Field(pattern=r"^(\*|https?://[^/\s]+)$")]] = Field(
        [],
        description="Origins of web pages that may use the endpoint (CORS), such as "
        "https://app.example.com, or *.",
    )
    served_model_name: list[Annotated[str, Field(min_length=1)]] = Field(
        [],
        description="Names of the model in requests; answers have the first. Empty: ORG/NAME of a "
        "checkpoint in the cache of huggingface_hub, else the directory's name.",
    )
    response_template: str = Field(
        "",
        description="How the model writes reasoning and tool calls: a family of docs/models.md, or a file. "
        "Empty: what fits its tokenizer and chat template.",
    )
    stored_responses: int = Field(
        1024,
        ge=0,
        description="Most responses of /v1/responses kept in memory, with at most 64 MiB, for "
        "previous_response_id.",
    )
    dashboard: bool = Field(
        True,
        description="Serve the dashboard at the endpoint's / (docs/dashboard.md). It costs nothing "
        "without viewers, and asks for an API key if there are any.",
    )
    operator_page: bool = Field(
        False,
        description="Dashboard buttons that kill, stop and start servers, scale and rebalance, if no "
        "API key is set. `eaas up` turns it on, on loopback only.",
    )
    drain_timeout_s: Seconds = Field(
        60.0,
        description="Longest wait for running requests after SIGTERM; a second signal ends it.",
    )

    def model_names(self, model: Path) -> tuple[str, ...]:
        """Return the names that requests may use for a checkpoint; answers have the first."""
        return tuple(self.served_model_name) or (model_name(model), str(model))


class AttentionClientConfig(_Section):
    """An attention client: runs the model without its experts, for frontends."""

    engine_host: str = Field(
        "127.0.0.1",
        description="Address of the engine, to which frontends connect; 0.0.0.0 for those on other machines.",
    )
    engine_port: Port = Field(0, description="Port of the engine; 0 picks a free port.")
    metrics_port: Port = Field(0, description="Port for Prometheus metrics; 0 disables it.")
    health_port: Port = Field(
        0, description="Port for HTTP probes (/health, /live), without TLS; 0 disables it."
    )
    transport: Annotated[str, AfterValidator(_transport)] = Field(
        AUTO,
        description="Transport to each server: shm, grpc, nixl or one of another package. auto: shm where "
        "the client can map a server's memory (same machine, pid namespace and user), else grpc.",
    )
    threads: int = Field(
        0,
        ge=0,
        description="Torch threads; 0: half of the cores, and all for attention and products without torch.",
    )
    slots: int = Field(
        3,
        ge=2,
        le=256,
        description="Number of slots on each server: two micro-batches and a request that is sent again.",
    )
    dispatch: Literal["least_loaded", "weights"] = Field(
        "least_loaded",
        description="Choice of a replica for each token and expert: least_loaded, or weights, the "
        "placement's shares alone.",
    )
    overlap: Annotated[Literal["auto", "on", "off"], BeforeValidator(_on_off)] = Field(
        "auto",
        description="Double-batch overlap: one micro-batch computes attention while another waits for"
        " its experts. auto: for the batches where it is faster.",
    )
    compile: bool = Field(
        True,
        description="Compile forward passes while serving; needs g++, and overlap must not be on.",
    )
    hedge_share: float = Field(
        0.05, ge=0, le=1, description="Upper limit of hedged requests, as a share of all requests."
    )
    checksum: bool = Field(False, description="Verify a checksum of every slot in both directions.")
    layer_timeout_s: Seconds = Field(
        10.0, description="Deadline of one MoE layer, over all attempts."
    )
    drain_timeout_s: Seconds = Field(
        60.0,
        description="Longest wait after SIGTERM for requests that no other engine can go on with; a second "
        "signal ends it.",
    )
    patience_s: Seconds = Field(
        240.0,
        description="vLLM: longest wait of a batch for an expert without a replica; then vLLM ends.",
    )
    attempt_timeout_s: Seconds = Field(
        0.15, description="Minimum time for a server to answer before another replica is asked."
    )
    cache_blocks: int = Field(
        0,
        ge=0,
        description="Blocks of 64 tokens in the key-value cache; 0: a quarter of free memory, at most 4 GiB.",
    )
    max_batch_tokens: int = Field(
        2048,
        ge=1,
        le=4096,
        description="Most tokens of a forward pass, and of each slot; longer prompts go in parts.",
    )
    inter_token_target_ms: float = Field(
        0.0,
        ge=0,
        le=60_000,
        description="Wanted time between two tokens of an answer while prompts wait; 0: that of a pass.",
    )
    scheduler: SchedulerConfig = Field(
        SchedulerConfig(), description="Choice of the waiting requests that run together."
    )


class TelemetryConfig(_Section):
    """Request traces of attention clients and expert servers."""

    traces: bool = Field(
        False,
        description="Send traces to a collector (docs/metrics.md); needs pip install 'expert-as-a-"
        "service[otel]'.",
    )
    sampling: float = Field(0.01, ge=0, le=1, description="Share of requests that are traced.")
    endpoint: str = Field(
        "http://127.0.0.1:4317",
        pattern=r"^https?://[^/\s]+$",
        description="OTLP collector (gRPC); http means plain text, https means TLS.",
    )


Resources = dict[str, Annotated[float, Field(ge=0)]]


class RayConfig(_Section):
    """What each process reserves on Ray (`eaas up --on ray`), beside the memory for its weights.

    Amounts by name: CPU, GPU, memory (bytes), or a resource of your own from `ray start --resources`.
    """

    expert_server: Resources = Field(
        {},
        description="Of each expert server: amounts by name, CPU, GPU, memory (bytes), or a resource "
        "of your own.",
    )
    attention_client: Resources = Field({}, description="Of the attention client.")
    control: Resources = Field(
        {}, description="Of the monitor, the balancer and the controller, each."
    )


class ClusterConfig(BaseSettings):
    """Settings of a cluster (`cluster.yaml`)."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_nested_delimiter=BETWEEN, extra="forbid", frozen=True
    )

    security: SecurityConfig = SecurityConfig()
    monitor: MonitorConfig = MonitorConfig()
    balancer: BalancerConfig = BalancerConfig()
    autoscaler: AutoscalerConfig = AutoscalerConfig()
    expert_server: ExpertServerConfig = ExpertServerConfig()
    attention_client: AttentionClientConfig = AttentionClientConfig()
    frontend: FrontendConfig = FrontendConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    ray: RayConfig = RayConfig()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Order the sources of settings by precedence: command line, environment, file."""
        return init_settings, env_settings, YamlConfigSettingsSource(settings_cls)
