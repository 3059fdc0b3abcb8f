"""The pods of the RayCluster match Kubernetes' schema; KubeRay's own schema is not at hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

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
