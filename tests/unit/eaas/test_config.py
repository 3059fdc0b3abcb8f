"""Settings: precedence of command line, environment and file, and one-line errors."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from eaas.config import ClusterConfig, FrontendConfig, load_config
from eaas.config.explanations import variable
from eaas.config.former import FORMER_SETTINGS
from eaas.errors import ConfigError

ROOT = Path(__file__).parents[3]
SECTIONS = tuple(ClusterConfig.model_fields)


@pytest.fixture
def cluster_yaml(tmp_path: Path) -> Path:
    return tmp_path / "cluster.yaml"


def test_command_line_over_environment_over_file(
    cluster_yaml: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster_yaml.write_text("attention_client: {metrics_port: 1, threads: 1, slots: 7}\n")
    monkeypatch.setenv("EAAS_ATTENTION_CLIENT__THREADS", "2")
    monkeypatch.setenv("EAAS_ATTENTION_CLIENT__METRICS_PORT", "2")
    given = {"metrics_port": 3, "transport": None}
    client = load_config(cluster_yaml, attention_client=given).attention_client
    assert (client.metrics_port, client.threads, client.slots) == (3, 2, 7)
    assert client.transport == "auto"


def test_a_setting_within_a_setting(cluster_yaml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster_yaml.write_text("attention_client: {scheduler: {batch_size: 2, window_size: 3}}\n")
    monkeypatch.setenv("EAAS_ATTENTION_CLIENT__SCHEDULER__STRATEGY", "fcfs")
    monkeypatch.setenv("EAAS_ATTENTION_CLIENT__SCHEDULER__WINDOW_SIZE", "5")
    scheduler = load_config(cluster_yaml).attention_client.scheduler
    assert (scheduler.strategy, scheduler.batch_size, scheduler.window_size) == ("fcfs", 2, 5)
    monkeypatch.setenv("EAAS_ATTENTION_CLIENT__SCHEDULER__WINDOW_SIZE", "none")
    with pytest.raises(ConfigError, match="EAAS_ATTENTION_CLIENT__SCHEDULER__WINDOW_SIZE: "):
        load_config(cluster_yaml)


def test_the_example_equals_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EAAS_ATTENTION_CLIENT__COMPILE", raising=False)  # set for all tests
    path = ROOT / "examples" / "cluster.yaml"
    assert yaml.safe_load(path.read_text()) == ClusterConfig().model_dump()
    assert load_config(path).model_dump() == ClusterConfig().model_dump()


def test_the_example_is_made_from_the_settings() -> None:
    maker = runpy.run_path(str(ROOT / "docs" / "make_settings.py"))
    assert maker["PAGE"].read_text() == maker["listing"](), "run `python docs/make_settings.py`"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("monitor: {pirt: 1}", "monitor.pirt = 1: no such setting"),
        ("monitr: {port: 1}", "monitr = {'port': 1}: no such setting"),
        ("monitor: {port: 65536}", "monitor.port = 65536"),
        ("monitor: {lease_s: 0}", "monitor.lease_s = 0"),
        ("monitor:", "monitor = None"),
        ("attention_client: {transport: rdma}", "is none of auto, shm, grpc, nixl"),
        ("attention_client: {scheduler: {stratgy: x}}", "attention_client.scheduler.stratgy = 'x'"),
        ("attention_client: {scheduler: {window_size: 4}}", "window_size 4 is below batch_size 32"),
        ("expert_server: {kernel: cuda}", "expert_server.kernel = 'cuda'"),
        ("expert_server: {quantization: 8}", "'none', 'int8' or 'int4'"),
        ("monitor: [", "YAML"),
        ("- 1", "YAML"),
        ("monitor", "YAML"),
        ("\x01", "YAML"),
        ("\udcff\udcfe", "YAML"),
    ],
)
def test_a_wrong_file(cluster_yaml: Path, text: str, named: str) -> None:
    cluster_yaml.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError) as caught:
        load_config(cluster_yaml)
    message = str(caught.value)
    assert message.startswith(str(cluster_yaml))
    assert named in message
    assert "\n" not in message


@pytest.mark.parametrize("name", FORMER_SETTINGS)
def test_a_removed_setting_names_the_fixed_value(
    cluster_yaml: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    document: object = 1
    for part in reversed(name.split(".")):
        document = {part: document}
    cluster_yaml.write_text(yaml.safe_dump(document))
    told = f"no longer a setting: it {FORMER_SETTINGS[name]}. Delete this setting"
    with pytest.raises(ConfigError) as caught:
        load_config(cluster_yaml)
    assert str(caught.value) == f"{cluster_yaml}: {name} = 1: {told}"
    environment = variable(*name.split("."))
    monkeypatch.setenv(environment, "1")
    with pytest.raises(ConfigError) as caught:
        load_config()
    assert str(caught.value) == f"{environment}: {name} = '1': {told}"


@pytest.mark.parametrize("name", ["nowhere.yaml", "."])
def test_an_empty_file_means_defaults_and_no_file_is_an_error(
    cluster_yaml: Path, name: str
) -> None:
    cluster_yaml.write_text("")
    assert load_config(cluster_yaml).model_dump() == ClusterConfig().model_dump()
    with pytest.raises(ConfigError, match="no such file"):
        load_config(cluster_yaml.parent / name)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("EAAS_MONITOR__PORT", "many"),
        ("EAAS_MONITOR__PORT", "-1"),
        ("EAAS_MONITOR__PIRT", "1"),
        ("EAAS_MONITR__PORT", "1"),
        ("EAAS_BALANCR__POLICY", "1"),
        ("EAAS_ATTENTION_CLIENT__CACHE_BLOKS", "1"),
        ("eaas_monitr__port", "1"),
        ("EAAS_MONITOR_PORT", "1"),
        ("EAAS_SECURITY_TLS_DIR", "/certificates"),
        ("EAAS_MONITOR", "many"),
        ("EAAS_ATTENTION_CLIENT__TRANSPORT", "rdma"),
    ],
)
def test_a_wrong_variable(monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError) as caught:
        load_config()
    message = str(caught.value)
    # pydantic's message for invalid JSON names the section.
    assert variable in message or (variable == "EAAS_MONITOR" and '"monitor"' in message)
    assert "\n" not in message


SERVICES = ("EAAS", "EAAS_MONITOR", "EAAS_ATTENTION_CLIENT", "EAAS_X")
ADDRESS = "tcp://10.0.0.1:80"


KUBERNETES = {
    **{"SERVICE_HOST": "10.0.0.1", "SERVICE_PORT": "80", "SERVICE_PORT_HTTP_2": "80"},
    **{"PORT": ADDRESS, "PORT_80_TCP": ADDRESS, "PORT_80_TCP_PROTO": "tcp"},
    **{"PORT_80_UDP_PORT": "80", "PORT_80_TCP_ADDR": "10.0.0.1"},
}
OTHERS = ("EAAS_HOME", "EAAS_PORT", "eaas_port", "EAAS_", "eaas", "XEAAS_Y__Z")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((f"{service}_{n}", value) for service in SERVICES for n, value in KUBERNETES.items()),
        *((name, "1") for name in OTHERS),
    ],
)
def test_variables_of_kubernetes_and_of_other_programs_are_ignored(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    assert load_config().monitor == ClusterConfig().monitor


def test_a_section_as_json_and_lower_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAAS_MONITOR", '{"port": 7, "host": "::1"}')
    monkeypatch.setenv("eaas_monitor__port", "8")
    monitor = load_config().monitor
    assert (monitor.host, monitor.port) == ("::1", 8)


def test_one_underscore_for_two_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAAS_EXPERT_SERVER_THREADS", "2")
    message = r"^EAAS_EXPERT_SERVER_THREADS: no such setting; is it EAAS_EXPERT_SERVER__THREADS\?$"
    with pytest.raises(ConfigError, match=message):
        load_config()


def test_a_wrong_option_is_named() -> None:
    with pytest.raises(
        ConfigError, match=r"^--transport: .*'rdma'.* is none of auto, shm, grpc, nixl$"
    ):
        load_config(attention_client={"transport": "rdma"})
    with pytest.raises(ConfigError, match=r"^--quantization: .*'int9'.* 'int8' or 'int4'$"):
        load_config(expert_server={"quantization": "int9"})


# hypothesis builds its table of characters at first use, which takes seconds.
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    document=st.dictionaries(
        st.sampled_from(SECTIONS),
        st.dictionaries(
            st.sampled_from(["port", "host", "threads", "lease_s", "transport"])
            | st.text(max_size=8),
            st.none() | st.integers(-10, 100_000) | st.text(max_size=8),
            max_size=2,
        ),
    )
)
def test_any_document_gives_settings_or_a_one_line_error(
    tmp_path_factory: pytest.TempPathFactory, document: dict[str, dict[str, object]]
) -> None:
    path = tmp_path_factory.mktemp("any") / "cluster.yaml"
    path.write_text(yaml.safe_dump(document))
    try:
        loaded = load_config(path)
    except ConfigError as error:
        message = str(error)
    else:
        message = ""
        for section, fields in document.items():
            for name, value in fields.items():
                # pydantic reads a number out of a text.
                assert str(getattr(getattr(loaded, section), name)) in (str(value), f"{value}.0")
    assert "\n" not in message


@pytest.mark.parametrize("origin", ["app.example", "https://app.example/", "ftp://x", ""])
def test_an_allowed_origin_has_a_scheme_and_no_path(origin: str) -> None:
    with pytest.raises(ValidationError):
        FrontendConfig(allowed_origins=[origin])
