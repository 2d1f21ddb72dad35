"""What the NetworkPolicies allow, as a network that enforces them would judge it.

As much of the rules as ours use: pod and namespace selectors with labels or `In`, ports by
number or name. Entry point: `Network`.
"""

from dataclasses import dataclass
from typing import Any

from tests.unit.k8s.rendering import Document, Manifests, container_of

NAMESPACE = "octavo"


@dataclass(frozen=True)
class Peer:
    """A pod of ours (by the labels of its template), or one of another namespace."""

    labels: dict[str, str]
    namespace: str = NAMESPACE
    ports: tuple[tuple[str, int], ...] = ()


OUTSIDE = Peer({}, namespace="anywhere")
MONITORING = Peer({}, namespace="monitoring")


class Network:
    """The policies of one rendering."""

    def __init__(self, manifests: Manifests) -> None:
        self._policies = manifests.of_kind("NetworkPolicy")
        self._pods = {
            name: Peer(
                template["metadata"]["labels"],
                ports=tuple(
                    (port["name"], port["containerPort"])
                    for port in container_of(template).get("ports", ())
                ),
            )
            for name, template in manifests.workloads()
        }

    def pod(self, name: str) -> Peer:
        return self._pods[name]

    def allows(self, source: Peer, target: Peer, port: int) -> bool:
        """Whether `source` may open a TCP connection to that port: both ends must say so."""
        leaves = source.namespace != NAMESPACE or self._passes("egress", source, target, port)
        enters = target.namespace != NAMESPACE or self._passes("ingress", target, source, port)
        return leaves and enters

    def _passes(self, direction: str, subject: Peer, other: Peer, port: int) -> bool:
        kind = direction.capitalize()
        policies = [
            policy["spec"]
            for policy in self._policies
            if kind in policy["spec"]["policyTypes"]
            and _selects(policy["spec"]["podSelector"], subject.labels)
        ]
        if not policies:
            return True
        rules = [rule for policy in policies for rule in policy.get(direction, ())]
        target = subject if direction == "ingress" else other
        end = "from" if direction == "ingress" else "to"
        return any(
            _has_peer(rule.get(end), other) and _has_port(rule.get("ports"), target, port)
            for rule in rules
        )


def _has_peer(peers: list[Document] | None, other: Peer) -> bool:
    if peers is None:
        return True
    for peer in peers:
        namespaces = peer.get("namespaceSelector")
        if namespaces is None:
            is_there = other.namespace == NAMESPACE
        else:
            is_there = _selects(namespaces, {"kubernetes.io/metadata.name": other.namespace})
        if is_there and _selects(peer.get("podSelector", {}), other.labels):
            return True
    return False


def _has_port(ports: list[Document] | None, target: Peer, port: int) -> bool:
    if ports is None:
        return True
    named = dict(target.ports)
    return any(
        item.get("protocol", "TCP") == "TCP" and named.get(item["port"], item["port"]) == port
        for item in ports
    )


def _selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    wanted = selector.get("matchLabels", {})
    if any(labels.get(key) != value for key, value in wanted.items()):
        return False
    for expression in selector.get("matchExpressions", ()):
        assert expression["operator"] == "In"
        if labels.get(expression["key"]) not in expression["values"]:
            return False
    return True
