"""The manifests match Kubernetes' schemas and fit together. No cluster has run them."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from eaas.config import BalancerConfig, ExpertServerConfig

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


WORKLOADS = [o for o in OBJECTS if o["kind"] in ("Deployment", "StatefulSet")]


def containers(workload: dict[str, Any]) -> Iterator[dict[str, Any]]:
    pod = workload["spec"]["template"]["spec"]
    yield from pod.get("initContainers", [])
    yield from pod["containers"]


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
    pod = workload["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    # The variables of a Service `eaas-...` would be taken for settings that do not exist.
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
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            ports = {port["name"]: port["containerPort"] for port in container.get("ports", [])}
            if "exec" in container.get(probe, {}):
                # The kubelet's own probe of gRPC cannot show a certificate.
                shell, _, line = container[probe]["exec"]["command"]
                asked = f'exec python -m eaas.health "$POD_IP:{ports["grpc"]}" {command}'
                assert (shell, line) == ("sh", asked)
                assert container[probe]["timeoutSeconds"] > 4
            elif probe in container:
                assert container[probe]["httpGet"]["port"] in ports
        for port in container.get("ports", []):
            words = " ".join(arguments).replace("=", " ").split()
            assert words[words.index("--port") + 1] == str(port["containerPort"])


@pytest.mark.parametrize("workload", WORKLOADS, ids=name_of)
def test_every_role_has_its_own_certificate(workload: dict[str, Any]) -> None:
    """Files have the names that `Identity` reads, and only the pod's user can read them."""
    pod = workload["spec"]["template"]["spec"]
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
    (workload,) = [w for w in WORKLOADS if w["metadata"]["name"] == "attention-client"]
    pod = workload["spec"]["template"]["spec"]
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
    servers = the("StatefulSet/expert-server")["spec"]
    drain_s = ExpertServerConfig().drain_timeout_s
    assert servers["template"]["spec"]["terminationGracePeriodSeconds"] > drain_s + 5
    # Else the number would be this file's at each `kubectl apply`.
    assert "replicas" not in servers
    # None is ready before all that the balancer waits for are there.
    assert servers["podManagementPolicy"] == "Parallel"


def test_kustomize_builds_it(tmp_path: Path) -> None:
    """kustomize builds them, also with the component for a checkpoint of docs/deploy.md."""
    if shutil.which("kubectl") is None:
        pytest.skip("needs kubectl")
    shutil.copytree(KUBERNETES, tmp_path / "kubernetes")
    (tmp_path / "kustomization.yaml").write_text(
        "resources: [kubernetes]\ncomponents: [kubernetes/checkpoint]\n"
    )
    done = subprocess.run(
        ["kubectl", "kustomize", str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    built = {name_of(o): o for o in yaml.safe_load_all(done.stdout)}
    assert built.keys() == {name_of(o) for o in OBJECTS}
    for name in ("StatefulSet/expert-server", "Deployment/attention-client"):
        assert built[name]["metadata"]["namespace"] == "eaas"
        pod = built[name]["spec"]["template"]["spec"]
        assert "initContainers" not in pod
        assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == "checkpoint"
        (container,) = pod["containers"]
        assert container["volumeMounts"][0] == {
            "name": "models",
            "mountPath": "/models/demo",
            "readOnly": True,
        }
        assert container["image"] == "registry.example.com/expert-as-a-service:0.1.0"
