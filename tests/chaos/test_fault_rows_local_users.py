"""Row 43 of the fault contract: on loopback without TLS, only the cluster's own user has access."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from eaas import user_files
from eaas.net import server_records
from eaas.net.grpc_client import channel
from eaas.rpc.v1 import monitor_pb2, monitor_pb2_grpc

ROOT = Path(__file__).parents[2]
AS_ANOTHER = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")

needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root and setpriv"
)

# A stranger's calls, through plain gRPC and through this project's channel, with made-up secrets.
ATTACK = """
import itertools, json, sys
import grpc
from eaas.net.grpc_client import channel
from eaas.rpc.v1 import (balancer_pb2 as b, balancer_pb2_grpc as bg, expert_pb2 as e, expert_pb2_grpc as eg,
                         monitor_pb2 as m, monitor_pb2_grpc as mg)
monitor, balancer, server = sys.argv[1:]
member = m.RegisterRequest()
member.member.id = "rogue"
shard = e.ReadShardRequest(shard="model-00001-of-00002.safetensors", end=9)
huge = e.ConnectRequest(client_id="c", client_incarnation=2**63, transport="grpc", slots=4)
attacks = {
    "ReadShard": (server, eg.ExpertServiceStub, "ReadShard", shard),
    "Register": (monitor, mg.MonitorServiceStub, "Register", member),
    "Heartbeat": (monitor, mg.MonitorServiceStub, "Heartbeat", iter([m.HeartbeatRequest(id="x")])),
    "Watch": (monitor, mg.MonitorServiceStub, "Watch", m.WatchRequest()),
    "GetRecord": (monitor, mg.MonitorServiceStub, "GetRecord", m.GetRecordRequest(id="balancer")),
    "Apply": (balancer, bg.BalancerServiceStub, "Apply", b.ApplyRequest()),
    "Scale": (balancer, bg.BalancerServiceStub, "Scale", b.ScaleRequest(servers=9)),
    "GetPlacement": (balancer, bg.BalancerServiceStub, "GetPlacement", b.GetPlacementRequest()),
    "Connect": (server, eg.ExpertServiceStub, "Connect", huge),
    "Exchange": (server, eg.ExpertServiceStub, "Exchange", iter([e.ExchangeRequest(connection_id="x")])),
    "Join": (server, eg.ExpertServiceStub, "Join", iter([e.JoinRequest(connection_id="x")])),
    "DescribeCheckpoint": (server, eg.ExpertServiceStub, "DescribeCheckpoint", e.DescribeCheckpointRequest()),
    "Drain": (server, eg.ExpertServiceStub, "Drain", e.DrainRequest()),
}
told = {}
for (name, (address, stub, method, request)), how in itertools.product(attacks.items(), range(4)):
    line = channel(address) if how == 0 else grpc.insecure_channel(address)
    shown = {2: [("authorization", "Bearer " + "0" * 64)], 3: [("authorization", "Bearer ")]}.get(how)
    with line:
        try:
            answer = getattr(stub(line), method)(request, timeout=20, metadata=shown)
            answer = str(list(answer) if hasattr(answer, "__next__") else answer)
        except grpc.RpcError as error:
            answer = error.code().name
        told[f"{name} {how}"] = answer
    if answer != "UNAUTHENTICATED":
        break
print(json.dumps(told))
"""
# Listens on the address of a dead server and prints the credentials that callers show.
SQUAT = """
import sys
from concurrent import futures
import grpc
class Ear(grpc.GenericRpcHandler):
    def service(self, details):
        print("called", dict(details.invocation_metadata).get("authorization"), flush=True)
server = grpc.server(futures.ThreadPoolExecutor(4), handlers=(Ear(),))
assert server.add_insecure_port(sys.argv[1])
server.start()
print("listens", flush=True)
sys.stdin.read()
"""


def as_another(program: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*AS_ANOTHER, sys.executable, "-c", program, *arguments],
        cwd=ROOT,
        env=os.environ | {"HOME": "/"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@needs_root
def test_row_43_another_user_of_the_machine_is_refused(
    checkpoint: Callable[..., Path], start_cluster: Callable[..., Any]
) -> None:
    cluster = start_cluster(checkpoint(), servers=1, redundancy=1, operator_page=True)
    children = cluster.children
    addresses = [str(children[n].address) for n in ("monitor", "balancer", "expert-server-0")]

    # Every call but the health check is refused.
    with as_another(ATTACK, *addresses) as attacker:
        told = json.loads(attacker.communicate(timeout=120)[0])
    assert set(told.values()) == {"UNAUTHENTICATED"}, told
    with channel(addresses[0]) as line:
        stub = monitor_pb2_grpc.MonitorServiceStub(line)
        snapshot = next(
            stub.Watch(monitor_pb2.WatchRequest(knows_frontends=True), timeout=20)
        ).snapshot
    assert {m.id for m in snapshot.members} == {
        *("monitor", "balancer", "expert-server-0", "attention-client-0", "frontend")
    }
    completion = {"prompt": "a", "max_tokens": 2}
    assert httpx.post(f"{cluster.endpoint}/v1/completions", json=completion, timeout=60).is_success

    # Another user can read neither the records nor the processes' environment.
    place = user_files.place()
    assert place is not None
    secret = server_records.cluster_secret(addresses[0])
    assert secret is not None
    record = place / f"{addresses[0]}.json"
    assert secret in record.read_text()
    for path in (record, Path(f"/proc/{children['monitor'].pid}/environ")):
        assert subprocess.run([*AS_ANOTHER, "cat", path], capture_output=True).returncode
    for child in children.values():
        assert secret.encode() not in Path(f"/proc/{child.pid}/cmdline").read_bytes()
        assert secret not in "".join(p.read_text() for p in cluster.log_dir.glob("*.log"))

    # The dashboard shows no buttons without the operator's token.
    token = server_records.find(cluster.endpoint.removeprefix("http://"))
    assert token is not None
    with httpx.Client(base_url=cluster.endpoint, timeout=60, follow_redirects=True) as http:
        assert http.get("/eaas/v1/snapshot").json()["is_operator"] is False
        assert http.post("/eaas/v1/actions", json={"action": "rebalance"}).status_code == 403
        assert http.get(f"/operator/{'0' * 64}/").status_code == 403
        assert http.get("/eaas/v1/snapshot").json()["is_operator"] is False
        assert http.get(f"/operator/{token.secret}/").url.path == "/"
        assert http.get("/eaas/v1/snapshot").json()["is_operator"] is True
        assert http.post("/eaas/v1/actions", json={"action": "no"}).status_code == 400

    # A process that takes a dead server's port does not learn the secret and cannot act as that server.
    os.kill(children["monitor"].pid, signal.SIGKILL)
    children["monitor"].reap(10)
    with as_another(SQUAT, addresses[0]) as squatter:
        assert squatter.stdout is not None
        assert squatter.stdout.readline() == "listens\n"
        time.sleep(2.5)  # Members try to register again meanwhile.
        with channel(addresses[0]) as line, pytest.raises(grpc.RpcError) as refusal:
            monitor_pb2_grpc.MonitorServiceStub(line).Register(monitor_pb2.RegisterRequest())
        assert refusal.value.code() is grpc.StatusCode.UNAVAILABLE
        heard, _ = squatter.communicate(timeout=20)
    assert heard == ""
    # Serving goes on, and a monitor that returns there has the secret.
    assert httpx.post(f"{cluster.endpoint}/v1/completions", json=completion, timeout=60).is_success
    assert server_records.monitor_secret(addresses[0]) == secret
