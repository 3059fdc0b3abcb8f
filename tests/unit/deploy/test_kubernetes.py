"""The manifests match Kubernetes' schemas and fit together. `deploy/kubernetes/try/try.sh` runs them."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from eaas.config import (
    AttentionClientConfig,
    BalancerConfig,
    ExpertServerConfig,
    FrontendConfig,
    load_config,
)

KUBERNETES = Path(__file__).parents[3] / "deploy" / "kubernetes"
VERSION = "1.37"


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


KUSTOMIZATION = documents(KUBERNETES / "kustomization.yaml")[0]
OBJECTS = [o for name in KUSTOMIZATION["resources"] for o in documents(KUBERNETES / name)]


def name_of(manifest: dict[str, Any]) -> str:
    return f"{manifest['kind']}/{manifest['metadata']['name']}"


def the(name: str) -> dict[str, Any]:
    (found,) = [o for o in OBJECTS if name_of(o) == name]
    return found


WORKLOADS = [o for o in OBJECTS if o["kind"] == "Deployment"]


def pod_of(workload: dict[str, Any]) -> dict[str, Any]:
    pod: dict[str, Any] = workload["spec"]["template"]["spec"]
    return pod


def containers(workload: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield from pod_of(workload).get("initContainers", [])
    yield from pod_of(workload)["containers"]


def test_every_file_is_applied() -> None:
    files = {path.name for path in KUBERNETES.glob("*.yaml")}
    assert set(KUSTOMIZATION["resources"]) == files - {"kustomization.yaml"}


@pytest.mark.parametrize("manifest", OBJECTS, ids=name_of)
def test_the_schema(manifest: dict[str, Any]) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate")
    assert validate.validate(manifest, VERSION, strict=True) == VERSION


@pytest.mark.parametrize("workload", WORKLOADS, ids=name_of)
def test_pods_are_restricted(workload: dict[str, Any]) -> None:
    """Pods meet the namespace's `pod-security.kubernetes.io/enforce: restricted`."""
    pod = pod_of(workload)
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    # A Service `eaas-...` would set names of settings in the pod.
    assert pod["enableServiceLinks"] is False
    labels = workload["spec"]["template"]["metadata"]["labels"]
    assert workload["spec"]["selector"]["matchLabels"].items() <= labels.items()
    volumes = {volume["name"] for volume in pod["volumes"]}
    for container in containers(workload):
        assert container["image"] == KUSTOMIZATION["images"][0]["name"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes


@pytest.mark.parametrize("workload", WORKLOADS, ids=name_of)
def test_commands_are_those_of_the_program(workload: dict[str, Any]) -> None:
    """Commands parse, and probes ask the port on which the command listens."""
    import typer

    from eaas_cli.commands import app

    for container in containers(workload):
        if container["name"] == "demo-model":
            # No program of ours: it takes the model that the image has to where the others look for it.
            assert container["command"] == ["cp", "-r", "/usr/local/share/eaas/demo", "/models"]
            dockerfile = (KUBERNETES.parent / "Dockerfile").read_text()
            assert "\nCOPY examples/demo /usr/local/share/eaas/demo\n" in dockerfile
            continue
        program, command, *arguments = container["command"]
        assert program == "eaas"
        known = {p.opts[0] for p in typer.main.get_command(app).commands[command].params}
        options = [a.partition("=")[0] for a in arguments if a.startswith("--")]
        assert set(options) <= known
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        health = ports.pop("health", None)
        ports.pop("metrics", None)
        for probe, path in (("startup", "/live"), ("readiness", "/health"), ("liveness", "/live")):
            asked = container[f"{probe}Probe"]["httpGet"]
            assert asked == {"path": path, "port": "http" if health is None else "health"}
        ((name, port),) = ports.items()
        words = " ".join(arguments).replace("=", " ").split()
        option = "--engine-port" if name == "engine" else "--port"
        assert words[words.index(option) + 1] == str(port)


@pytest.mark.parametrize("workload", WORKLOADS, ids=name_of)
def test_variables_are_settings(workload: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The settings accept the variables; the port of the probes is the container's."""
    (container,) = pod_of(workload)["containers"]
    for variable in container["env"]:
        monkeypatch.setenv(variable["name"], variable.get("value", "1"))
    settings = load_config()
    section = getattr(settings, workload["metadata"]["name"].replace("-", "_"))
    for port in container["ports"]:
        if port["name"] in ("health", "metrics"):
            assert getattr(section, f"{port['name']}_port") == port["containerPort"]


@pytest.mark.parametrize("workload", WORKLOADS, ids=name_of)
def test_every_role_has_its_own_certificate(workload: dict[str, Any]) -> None:
    """Files have the names that `Identity` reads, and only the pod's user can read them."""
    pod = pod_of(workload)
    container = pod["containers"][0]
    role = container["command"][1]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    secret = volumes["tls"]["secret"]
    assert secret["secretName"] == f"{role}-tls"
    assert {item["path"] for item in secret["items"]} == {"ca.pem", f"{role}.pem", f"{role}.key"}
    assert {item["key"] for item in secret["items"]} == {"ca.crt", "tls.crt", "tls.key"}
    assert secret["defaultMode"] == 0o440
    assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsUser"]
    (mount,) = [m for m in container["volumeMounts"] if m["name"] == "tls"]
    assert {"name": "EAAS_SECURITY__TLS_DIR", "value": mount["mountPath"]} in container["env"]
    assert "--insecure" not in container["command"]


def test_the_endpoint_asks_for_a_key() -> None:
    pod = pod_of(the("Deployment/frontend"))
    (keys,) = [v["secret"] for v in pod["volumes"] if v["name"] == "keys"]
    assert keys == {"secretName": "api-keys", "defaultMode": 0o440}
    (container,) = pod["containers"]
    (mount,) = [m for m in container["volumeMounts"] if m["name"] == "keys"]
    assert f"--api-key-file={mount['mountPath']}/keys" in container["command"]


def test_numbers_that_depend_on_one_another() -> None:
    autoscaler = the("HorizontalPodAutoscaler/expert-server")["spec"]
    (balancer,) = containers(the("Deployment/balancer"))
    command = balancer["command"]
    assert command[command.index("--servers") + 1] == str(autoscaler["minReplicas"])
    assert autoscaler["minReplicas"] >= BalancerConfig().redundancy
    assert autoscaler["scaleTargetRef"]["name"] == "expert-server"
    servers = the("Deployment/expert-server")["spec"]
    drain_s = ExpertServerConfig().drain_timeout_s
    assert servers["template"]["spec"]["terminationGracePeriodSeconds"] > drain_s + 5
    # Else the number would be this file's at each `kubectl apply`.
    assert "replicas" not in servers
    client = the("Deployment/attention-client")["spec"]["template"]["spec"]
    assert client["terminationGracePeriodSeconds"] > AttentionClientConfig().drain_timeout_s + 5
    frontend = the("Deployment/frontend")["spec"]["template"]["spec"]
    _, notice_s = frontend["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    ends_s = FrontendConfig().drain_timeout_s + float(notice_s)
    assert frontend["terminationGracePeriodSeconds"] > ends_s + 5


def test_who_may_connect_to_whom() -> None:
    """Only members reach engines; the endpoint and the metrics are for the whole Kubernetes cluster."""

    def ports(workload: str) -> dict[str, int]:
        (container,) = the(f"Deployment/{workload}")["spec"]["template"]["spec"]["containers"]
        return {port["name"]: port["containerPort"] for port in container["ports"]}

    for policy, workload, name in (
        ("endpoint", "frontend", "http"),
        ("metrics", "attention-client", "metrics"),
    ):
        spec = the(f"NetworkPolicy/{policy}")["spec"]
        assert spec["podSelector"]["matchLabels"] == {"app.kubernetes.io/name": workload}
        (rule,) = spec["ingress"]
        assert [each["port"] for each in rule["ports"]] == [ports(workload)[name]]
    services = {o["metadata"]["name"] for o in OBJECTS if o["kind"] == "Service"}
    assert "frontend" in services
    assert "attention-client" not in services
    (path,) = the("Ingress/endpoint")["spec"]["rules"][0]["http"]["paths"]
    assert path["backend"]["service"]["name"] == "frontend"
    for workload in WORKLOADS:
        annotations = workload["spec"]["template"]["metadata"].get("annotations", {})
        if "prometheus.io/port" in annotations:
            shown = ports(workload["metadata"]["name"])
            expected = shown.get("metrics", shown.get("http"))
            assert annotations["prometheus.io/port"] == str(expected)


@pytest.mark.parametrize("name", ["expert-server", "attention-client", "frontend"])
def test_replicas_are_spread_and_leave_one_at_a_time(name: str) -> None:
    """Fewer pods fit on one machine than there are: losing a machine leaves some."""
    spec = the(f"Deployment/{name}")["spec"]
    labels = {"matchLabels": {"app.kubernetes.io/name": name}}
    replicas = spec.get(
        "replicas", the("HorizontalPodAutoscaler/expert-server")["spec"]["minReplicas"]
    )
    constraints = spec["template"]["spec"]["topologySpreadConstraints"]
    assert all(c["labelSelector"] == labels for c in constraints)
    (strict,) = [c for c in constraints if c["whenUnsatisfiable"] == "DoNotSchedule"]
    assert strict["maxSkew"] < replicas
    # Without these a lost machine, or the only one, would count as another domain or as none.
    assert strict["minDomains"] == 2
    assert strict["nodeTaintsPolicy"] == "Honor"
    assert the(f"PodDisruptionBudget/{name}")["spec"] == {"maxUnavailable": 1, "selector": labels}
    assert spec["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}


def built_with(component: str, tmp_path: Path) -> dict[str, dict[str, Any]]:
    """What kustomize builds of the manifests with a component, by kind and name."""
    if shutil.which("kubectl") is None:
        pytest.skip("needs kubectl")
    shutil.copytree(KUBERNETES, tmp_path / "kubernetes")
    (tmp_path / "kustomization.yaml").write_text(
        f"resources: [kubernetes]\ncomponents: [kubernetes/{component}]\n"
    )
    done = subprocess.run(
        ["kubectl", "kustomize", str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    built = {name_of(o): o for o in yaml.safe_load_all(done.stdout)}
    assert built.keys() == {name_of(o) for o in OBJECTS}
    return built


SERVING = ("expert-server", "attention-client", "frontend")


def test_one_node(tmp_path: Path) -> None:
    """All pods fit on one machine."""
    built = built_with("one-node", tmp_path)
    for name in SERVING:
        pod = pod_of(built[f"Deployment/{name}"])
        assert "topologySpreadConstraints" not in pod
        assert pod["containers"][0]["resources"]["requests"]["cpu"] == "100m"


def test_a_gpu_for_each_expert_server(tmp_path: Path) -> None:
    built = built_with("gpu", tmp_path)
    for name in SERVING:
        (container,) = pod_of(built[f"Deployment/{name}"])["containers"]
        has_gpu = name == "expert-server"
        assert (container["resources"]["limits"].get("nvidia.com/gpu") == "1") == has_gpu
        device = {"name": "EAAS_EXPERT_SERVER__DEVICE", "value": "cuda"}
        assert (device in container["env"]) == has_gpu


def test_a_checkpoint_of_your_own(tmp_path: Path) -> None:
    built = built_with("checkpoint", tmp_path)
    mount = {"name": "models", "mountPath": "/models/demo", "readOnly": True}
    for name in SERVING:
        workload = built[f"Deployment/{name}"]
        assert workload["metadata"]["namespace"] == "eaas"
        pod = pod_of(workload)
        assert "initContainers" not in pod
        assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == "checkpoint"
        (container,) = pod["containers"]
        assert container["volumeMounts"][0] == mount
        assert container["image"] == "registry.example.com/expert-as-a-service:0.1.0"


RAY_CLUSTER = yaml.safe_load(
    (Path(__file__).parents[3] / "deploy" / "kuberay" / "raycluster.yaml").read_text()
)
GROUPS = {
    "head": RAY_CLUSTER["spec"]["headGroupSpec"],
    **{group["groupName"]: group for group in RAY_CLUSTER["spec"]["workerGroupSpecs"]},
}


@pytest.mark.parametrize("name", GROUPS)
def test_a_pod_of_the_group(name: str) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate")
    spec: dict[str, Any] = GROUPS[name]["template"]["spec"]
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}
    assert validate.validate(pod, "1.37", strict=True) == "1.37"
    # A Service `eaas-...` would set names of settings in the pod.
    assert spec["enableServiceLinks"] is False
    volumes = {volume["name"] for volume in spec["volumes"]}
    for container in spec["containers"]:
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes


def test_pods_of_servers_are_spread_by_a_label_that_they_have() -> None:
    (constraint,) = GROUPS["servers"]["template"]["spec"]["topologySpreadConstraints"]
    assert constraint["labelSelector"]["matchLabels"] == {"ray.io/group": "servers"}


def test_the_version_of_ray_is_the_one_that_the_image_has() -> None:
    constraints = (Path(__file__).parents[3] / "constraints.txt").read_text().split()
    assert f"ray=={RAY_CLUSTER['spec']['rayVersion']}" in constraints
