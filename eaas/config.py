"""One frozen settings object per role, read from `cluster.yaml`; `EAAS_...` in the environment overrides.

A section of the file is a role (`expert_server:`), a field is a line in it. The environment names both with
two underscores between them: `EAAS_EXPERT_SERVER__THREADS=2`. Unknown keys are errors.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    YamlConfigSettingsSource,
)

from eaas.api_keys import KEY_VARIABLE
from eaas.config_errors import BETWEEN, PREFIX, explain, variable
from eaas.config_telemetry import TelemetryConfig
from eaas.errors import ConfigError
from eaas.last_up import ENDPOINT_VARIABLE

__all__ = [
    "HOLD_BACK_S",
    "AttentionClientConfig",
    "AutoscalerConfig",
    "BalancerConfig",
    "ClusterConfig",
    "ExpertServerConfig",
    "MonitorConfig",
    "SchedulerConfig",
    "SecurityConfig",
    "load_config",
]

HOLD_BACK_S = 5.0
"""Longest that a client stays on the older placement while it connects to servers of the newer one.

What moved has to stay where it was for longer (`BalancerConfig.ack_timeout_s`).
"""

Seconds = Annotated[float, Field(gt=0, le=86_400)]
Port = Annotated[int, Field(ge=0, le=65_535)]


def _on_off(value: object) -> object:
    """YAML takes a bare on or off for a truth value."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class SecurityConfig(_Section):
    """Who is believed, and what is open to others."""

    tls_dir: str = Field(
        "",
        description="Directory with ca.pem, ROLE.pem and ROLE.key (`eaas certs`); empty: no TLS.",
    )
    insecure: bool = Field(
        False,
        description="Other machines may connect without TLS, or use the endpoint without a key.",
    )


class MonitorConfig(_Section):
    """The monitor: who is in the cluster."""

    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: Port = Field(0, description="gRPC port; 0 takes a free one.")
    lease_s: Seconds = Field(
        2.0,
        description="Within this after its last heartbeat a member is DEAD to all; SUSPECT where it is late.",
    )
    heartbeat_s: Seconds = Field(0.9, description="How often members are to send a heartbeat.")
    stop_members_on_exit: bool = Field(
        False, description="Tell every member to end when the monitor is stopped (a local cluster)."
    )
    store: Literal["embedded", "zookeeper"] = Field(
        "embedded",
        description="Where what it knows survives it: a file of its own, or ZooKeeper (several monitors).",
    )
    data_dir: str = Field(
        "", description="Directory of the embedded store; empty: it knows nothing after a restart."
    )
    zookeeper_hosts: str = Field(
        "127.0.0.1:2181", min_length=1, description="ZooKeeper's servers, HOST:PORT,HOST:PORT."
    )
    zookeeper_root: str = Field(
        "/eaas",
        pattern=r"^(/[A-Za-z0-9_-]+)+$",
        description="Path in ZooKeeper; one for each cluster.",
    )
    zookeeper_session_s: Seconds = Field(
        4.0, description="Silence after which ZooKeeper lets another monitor lead."
    )


class BalancerConfig(_Section):
    """The balancer: where the experts are."""

    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: Port = Field(0, description="gRPC port; 0 takes a free one.")
    expected_servers: int = Field(
        3, ge=1, description="Expert servers to wait for before the first placement."
    )
    redundancy: int = Field(2, ge=1, description="Servers that hold each expert.")
    max_servers: int = Field(
        64,
        ge=1,
        le=16_384,
        description="Most expert servers that anybody may ask a launcher for.",
    )
    apply_timeout_s: Seconds = Field(
        300.0, description="Longest that a server may take to load its experts."
    )
    dead_grace_s: Seconds = Field(
        30.0, description="How long a dead server's return is awaited before others get its share."
    )
    ack_timeout_s: Seconds = Field(
        10.0,
        ge=HOLD_BACK_S + 1.0,
        description="How long experts that moved stay for clients of the older placement.",
    )

    policy: Literal["spread", "eplb", "eplb-hierarchical", "scalpel", "craft", "fractional"] = (
        Field(
            "spread",
            description="Where experts go; spread looks at no load, so that nothing moves by itself.",
        )
    )
    num_redundant_experts: int = Field(
        0,
        ge=0,
        le=100_000,
        description="Replicas per layer for balance beyond one of each expert; as many as servers do.",
    )
    step_s: Seconds = Field(
        1.0,
        description="How often servers that work are asked what they computed; one step of the window.",
    )
    window_size: int = Field(
        120, ge=2, le=100_000, description="Steps of load history that a plan is made from."
    )
    step_interval: int = Field(
        60,
        ge=1,
        le=1_000_000,
        description="Plan anew every so many steps; those without tokens do not count.",
    )
    speeds: Literal["measured", "stated"] = Field(
        "measured",
        description="Whose word of servers' speeds counts: what they do, or expert_server.speed alone.",
    )
    knobs: str = Field(
        "static",
        min_length=1,
        description="Who sets K, budget and drift limits: static, live (from the load), or a trained file.",
    )
    latency_target_ms: float = Field(
        0.0,
        ge=0,
        le=60_000,
        description="For live knobs: mean time between two tokens that is to be held; 0: none.",
    )
    log_balancedness: bool = Field(
        False, description="Log mean over max of the servers' loads after each step."
    )
    use_async: bool = Field(
        True, description="Plan beside roll-outs and membership changes; off: these wait for plans."
    )
    drift_tv: float = Field(
        0.2,
        gt=0,
        le=2,
        description="Distance to the load planned for that calls for a plan at once; 2: none does.",
    )
    drift_tolerance: float = Field(
        0.2, gt=0, le=1000, description="Rise of the PAR that calls for a plan at once."
    )
    least_gain: float = Field(
        0.02, ge=0, le=1, description="Fall of the PAR below which nothing is changed."
    )
    horizon_s: Seconds = Field(
        600.0, description="Time in which moves must pay back what they cost."
    )
    link_bytes_per_s: int = Field(
        1_000_000_000, ge=1_000, description="Rate at which servers load experts, for that sum."
    )
    node_budget: int = Field(
        -1,
        ge=-1,
        le=100_000,
        description="Most replicas per layer on other nodes than their expert's first one; -1: any number.",
    )
    metrics_port: Port = Field(0, description="Port for Prometheus; 0: none.")


class AutoscalerConfig(_Section):
    """The autoscaler (`eaas autoscale`): how many expert servers there are."""

    target_utilization: float = Field(
        0.6,
        ge=0.05,
        le=0.8,
        description="Share of the time that servers are to be busy; at 1 requests wait for one another.",
    )
    tolerance: float = Field(
        0.15,
        ge=0.01,
        le=0.2,
        description="Nothing changes while utilisation is off its target by no more than this part of it.",
    )
    latency_target_ms: float = Field(
        0.0,
        ge=0,
        le=60_000,
        description="Mean time between two tokens of a request that calls for more servers; 0: none.",
    )
    min_servers: int = Field(
        1, ge=1, description="Fewest servers; never fewer than hold every expert."
    )
    max_servers: int = Field(8, ge=1, description="Most servers.")
    interval_s: Seconds = Field(
        15.0, description="How often it looks; what it measures is of the time between two looks."
    )
    cooldown_s: Seconds = Field(60.0, description="Least time between two changes.")
    scale_in_window_s: Seconds = Field(
        300.0, description="A server goes once it was not needed at any time of so long."
    )


class ExpertServerConfig(_Section):
    """An expert server: a share of the experts, behind slots."""

    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: Port = Field(0, description="gRPC port; 0 takes a free one.")
    threads: int = Field(0, ge=0, description="Intra-op threads; 0 shares the cores among servers.")
    kernel: Literal["auto", "native", "packed", "zentorch", "reference"] = Field(
        "auto",
        description="What computes the experts; auto takes the first that none clearly beats here.",
    )
    quantization: Literal["none", "int8", "int4"] = Field(
        "none", description="How weights are held in memory; activations keep 15 bits at least."
    )
    slots: int = Field(16, ge=2, le=4096, description="Slots in the arena, over all clients.")
    slot_tokens: int = Field(
        256,
        ge=1,
        le=65_536,
        description="Tokens that one slot can carry; larger batches are split.",
    )
    spin_us: int = Field(
        20, ge=-1, description="Microseconds to poll before sleeping; -1 polls for ever."
    )
    batching: Literal["immediate", "window", "all"] = Field(
        "window",
        description="What a batch waits for: nothing, company that is likely to pay, all active clients.",
    )
    batch_window_us: int = Field(
        1000,
        ge=0,
        le=1_000_000,
        description="Longest that a batch waits for company, microseconds.",
    )
    memory_bytes: int = Field(
        0, ge=0, description="Memory for expert weights; 0: no limit. The balancer keeps to it."
    )
    node: str = Field(
        "", description="Machine, or rack, within which traffic is cheap; empty: the host's name."
    )
    speed: float = Field(
        1.0, gt=0, le=1000, description="Speed relative to the other servers, until it is measured."
    )
    load_bytes_per_s: int = Field(
        0,
        ge=0,
        description="Fastest that experts are loaded while others are served; 0: no limit.",
    )
    drain_timeout_s: Seconds = Field(
        60.0, description="Longest that a server that is to leave waits for others to take over."
    )
    share_bytes_per_s: int = Field(
        500_000_000,
        ge=1_000_000,
        description="Fastest that servers without a checkpoint are sent this one's, all together.",
    )
    added_latency_us: int = Field(
        0,
        ge=0,
        le=10_000_000,
        description="For experiments: each request is seen so much later, as over a slow network.",
    )


class SchedulerConfig(_Section):
    """The scheduler of an attention client: which waiting requests run together."""

    strategy: str = Field(
        "cost_bounded",
        min_length=1,
        description="Who chooses; fcfs is first come, first served (docs/scheduling.md has them all).",
    )
    batch_size: int = Field(
        32,
        ge=1,
        le=1024,
        description="Most requests that run together; so many are chosen at a time.",
    )
    window_size: int = Field(
        128,
        ge=1,
        le=4096,
        description="Of the oldest waiting requests, how many may be chosen from; below, it is fcfs.",
    )
    most_stretch: float = Field(
        0.2,
        ge=0,
        le=10,
        description="cost_bounded: a request may end later than under fcfs by this part of its time there "
        "(twice that while the queue grows beyond chance), and by two batches.",
    )
    weight_pairs: float = Field(
        16.0,
        ge=0,
        le=10_000,
        description="An expert's weights cost a server as much as so many pairs of token and expert.",
    )
    predicted_layers: int = Field(
        1, ge=0, le=128, description="MoE layers whose routers are asked about a prompt; 0: none."
    )
    record: str = Field(
        "", description="File for the history of the queue (eaas simulate replay); empty: none."
    )

    @model_validator(mode="after")
    def _window_holds_a_batch(self) -> Self:
        if self.window_size < self.batch_size:
            raise ValueError(
                f"window_size {self.window_size} is below batch_size {self.batch_size}"
            )
        return self


class AttentionClientConfig(_Section):
    """An attention client: the model without its experts, and the HTTP endpoint."""

    host: str = Field("127.0.0.1", description="Address of the HTTP endpoint.")
    port: Port = Field(8000, description="Port of the HTTP endpoint; 0 takes a free one.")
    api_key_file: str = Field(
        "",
        description="File with the keys that requests may show, one a line; empty: EAAS_API_KEY's, or none.",
    )
    allowed_hosts: list[str] = Field(
        [],
        description="Names beside localhost that Host and Origin may hold while the endpoint is on loopback.",
    )
    dashboard: bool = Field(
        True, description="Show the cluster, and a chat, at the endpoint's / (docs/dashboard.md)."
    )
    operator_page: bool = Field(
        False,
        description="The page has buttons that kill, stop and start servers, scale and rebalance.",
    )
    transport: Literal["shm", "grpc", "nixl"] = Field(
        "shm", description="How tokens reach the servers."
    )
    threads: int = Field(0, ge=0, description="Intra-op threads; 0 takes half of the cores.")
    slots: int = Field(4, ge=2, le=256, description="Slots to ask for on each server.")
    spin_us: int = Field(
        20, ge=-1, description="Microseconds to poll before sleeping; -1 polls for ever."
    )
    dispatch: Literal["least_loaded", "split", "weights", "round_robin", "random"] = Field(
        "least_loaded", description="How replicas are chosen for the tokens of an expert."
    )
    overlap: Annotated[Literal["auto", "on", "off"], BeforeValidator(_on_off)] = Field(
        "auto",
        description="Two micro-batches, one computing while the other waits; auto: where it is faster.",
    )
    hedge_share: float = Field(
        0.05,
        ge=0,
        le=1,
        description="Share of requests that may go to a second replica when they take unusually long.",
    )
    checksum: bool = Field(
        False, description="Check every slot's bytes, both ways; costs a pass over them."
    )
    layer_timeout_s: Seconds = Field(
        10.0, description="Deadline of one MoE layer over all attempts; then the request fails."
    )
    attempt_timeout_s: Seconds = Field(
        0.15, description="Least time that a server gets to answer before a replica is asked too."
    )
    cache_blocks: int = Field(64, ge=2, description="Blocks of the key-value cache.")
    cache_block_tokens: int = Field(64, ge=4, description="Tokens in one block.")
    max_batch_tokens: int = Field(256, ge=1, description="Tokens in one step of the engine.")
    scheduler: SchedulerConfig = Field(
        SchedulerConfig(), description="Which waiting requests run together."
    )


class ClusterConfig(BaseSettings):
    """A whole cluster (`cluster.yaml`)."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_nested_delimiter=BETWEEN, extra="forbid", frozen=True
    )

    security: SecurityConfig = SecurityConfig()
    monitor: MonitorConfig = MonitorConfig()
    balancer: BalancerConfig = BalancerConfig()
    autoscaler: AutoscalerConfig = AutoscalerConfig()
    expert_server: ExpertServerConfig = ExpertServerConfig()
    attention_client: AttentionClientConfig = AttentionClientConfig()
    telemetry: TelemetryConfig = TelemetryConfig()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Command line first, then the environment, then the file."""
        return init_settings, env_settings, YamlConfigSettingsSource(settings_cls)


def load_config(path: Path | None = None, **overrides: dict[str, Any]) -> ClusterConfig:
    """Read the settings of a cluster.

    Args:
        path: `cluster.yaml`, or None for the defaults and the environment.
        overrides: Per section, the fields that the command line sets; None values are left out.

    Raises:
        ConfigError: The file is not there or not YAML, a key is unknown, a value is out of range.
    """
    if path is not None and not path.is_file():
        raise ConfigError(f"--config {path}: no such file; give a cluster.yaml")
    _refuse_unknown_variables()
    given: dict[str, Any] = {
        section: kept
        for section, fields in overrides.items()
        if (kept := {name: value for name, value in fields.items() if value is not None})
    }

    class Settings(ClusterConfig):
        model_config = SettingsConfigDict(yaml_file=path)

    try:
        return Settings(**given)
    except ValidationError as error:
        raise ConfigError(explain(error, path, given)) from error
    except SettingsError as error:
        raise ConfigError(f"environment: {error}; it is to be JSON") from error
    except (yaml.YAMLError, ValueError, TypeError, OSError) as error:
        what = " ".join(str(error).split())
        raise ConfigError(f"{path} is no YAML of sections and settings: {what}") from error


_OTHER_VARIABLES = (KEY_VARIABLE, ENDPOINT_VARIABLE)


def _refuse_unknown_variables() -> None:
    """pydantic passes over a variable whose section it does not know; a typing error is to be found."""
    for name in os.environ:
        section = name.upper().removeprefix(PREFIX).partition(BETWEEN)[0]
        known = section.lower() in ClusterConfig.model_fields or name.upper() in _OTHER_VARIABLES
        if name.upper().startswith(PREFIX) and not known:
            sections = ", ".join(variable(field) for field in ClusterConfig.model_fields)
            raise ConfigError(f"{name}: no such setting; they begin with one of {sections}")
