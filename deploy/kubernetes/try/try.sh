#!/usr/bin/env bash
# Tries deploy/kubernetes on the cluster that kubectl reaches: applies it, kills, drains, updates, scales and deletes it
# under load, and prints the failed requests by event. Exit status 0: none failed, and every answer was right.
#
#   deploy/kubernetes/try/try.sh [DIR]     DIR: a kustomization (default: deploy/kubernetes)
#
# NODE_KILL: a command that kills the node named by its argument; NODE_BACK: one that brings it back. Optional.
# Needs kubectl, openssl and eaas (for `eaas certs`). Creates and deletes the namespaces eaas and eaas-try.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd) dir=${1:-$(dirname "$0")/..}
k="kubectl -n eaas" roles="monitor balancer expert-server attention-client frontend" lost=-
say() { echo "$(date -u +%T) $*" >&2; }
event() { say "== $1"; kubectl -n eaas-try exec load -- sh -c "echo '$1' >> /tmp/event"; }
replicas() { $k get deployment "$1" -o jsonpath='{.spec.replicas}'; }
nodes() { $k get pods -l app.kubernetes.io/name="$1" -o jsonpath='{range .items[*]}{.spec.nodeName}{"\n"}{end}' | sort -u; }
# Every pod is ready, and none is ending, except on a lost node.
settled() {
  sleep 3
  for role in $roles; do $k rollout status deployment "$role" --timeout=600s >&2; done
  while $k get pods --no-headers -o wide | grep Terminating | grep -qv " $lost "; do sleep 1; done
  sleep "${CALM_S:-10}"
}

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
say "== apply"
kubectl apply -k "$dir" >&2
eaas certs "$scratch/tls" >&2
(umask 077; openssl rand -hex 24 > "$scratch/keys")
for role in $roles; do
  $k create secret generic "$role-tls" --from-file=ca.crt="$scratch/tls/ca.pem" \
    --from-file=tls.crt="$scratch/tls/$role.pem" --from-file=tls.key="$scratch/tls/$role.key" >&2
done
$k create secret generic api-keys --from-file=keys="$scratch/keys" >&2
servers=$($k get hpa expert-server -o jsonpath='{.spec.minReplicas}')
until [ "$(replicas expert-server)" -ge "$servers" ]; do sleep 1; done
settled
say "ready"
$k get pods -o wide >&2

kubectl create namespace eaas-try >&2
kubectl -n eaas-try create configmap load --from-file="$here/load.py" >&2
kubectl -n eaas-try create secret generic key --from-file=key="$scratch/keys" >&2
safe=$(nodes frontend | head -1)
kubectl -n eaas-try apply -f - >&2 <<Y
apiVersion: v1
kind: Pod
metadata: {name: load}
spec:
  restartPolicy: Never
  # A node that this script neither kills nor drains.
  nodeName: $safe
  containers:
    - name: load
      image: $($k get deployment frontend -o jsonpath='{.spec.template.spec.containers[0].image}')
      command: [sh, -c, 'EAAS_API_KEY=\$(cat /key/key) exec python /load/load.py http://frontend.eaas:8000']
      volumeMounts: [{name: load, mountPath: /load}, {name: key, mountPath: /key}, {name: tmp, mountPath: /tmp}]
  volumes:
    - {name: load, configMap: {name: load}}
    - {name: key, secret: {secretName: key}}
    - {name: tmp, emptyDir: {}}
Y
until kubectl -n eaas-try logs load 2>/dev/null | grep -q 'the load begins'; do
  if kubectl -n eaas-try get pod load | grep -q Error; then kubectl -n eaas-try logs load >&2; exit 1; fi
  sleep 1
done
sleep "${CALM_S:-10}"

for role in expert-server attention-client monitor balancer; do
  event "$role killed"
  pod=$($k get pods -l app.kubernetes.io/name="$role" -o jsonpath='{.items[0].metadata.name}')
  $k delete pod --force --grace-period=0 "$pod" >&2
  settled
done
# A request ends with the frontend that has its connection, so this node has none.
node=$(comm -13 <(nodes frontend) <(nodes expert-server) | head -1)
if [ -n "${NODE_KILL:-}" ] && [ -n "$node" ]; then
  event "node killed"
  $k get pods -o wide >&2
  lost=$node
  $NODE_KILL "$node"
  until $k get pods -o wide | grep " $node " | grep -q Terminating; do sleep 1; done
  settled
  $k get pods -o wide >&2
  if [ -n "${NODE_BACK:-}" ]; then
    event "node back"
    $NODE_BACK "$node"
    kubectl wait --for=condition=Ready node "$node" --timeout=600s >&2
    lost=-
    settled
  fi
fi
node=$(nodes expert-server | grep -vx -e "$safe" -e "$lost" | head -1)
event "node drained"
kubectl drain "$node" --ignore-daemonsets --delete-emptydir-data --timeout=600s >&2
settled
kubectl uncordon "$node" >&2
for role in expert-server attention-client frontend monitor balancer; do
  event "$role updated"
  $k rollout restart deployment "$role" >&2
  settled
done
event "a server more"
$k patch hpa expert-server -p "{\"spec\":{\"minReplicas\":$((servers + 1))}}" >&2
until [ "$(replicas expert-server)" -gt "$servers" ]; do sleep 1; done
settled
event "a server less"
$k patch hpa expert-server -p "{\"spec\":{\"minReplicas\":$servers}}" >&2
$k scale deployment expert-server --replicas="$servers" >&2
settled
event stop
until kubectl -n eaas-try get pod load | grep -q 'Completed\|Error'; do sleep 1; done
kubectl -n eaas-try logs load
passed=$(kubectl -n eaas-try get pod load -o jsonpath='{.status.phase}')
say "== delete"
kubectl delete namespace eaas-try >&2
kubectl delete -k "$dir" >&2
[ "$passed" = Succeeded ]
