"""A process with another checkpoint than its cluster is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from eaas.errors import ClusterError
from eaas.membership.same_checkpoint import refuse_other_checkpoint
from eaas.types import Member, MemberState, ModelShape, Role

OWN = ModelShape("qwen3_moe", 8, 64, 2, ("a", "b"), "bfloat16", "1" * 64)
OTHER = replace(OWN, num_experts=16, digest="2" * 64)


def member(state: MemberState, model: ModelShape | None, role: Role = Role.EXPERT_SERVER) -> Member:
    return Member("x", role, 1, "h", "", state, 1, model=model)


@pytest.mark.parametrize("state", [MemberState.SERVING, MemberState.DRAINING])
@pytest.mark.parametrize("role", [Role.EXPERT_SERVER, Role.ATTENTION_CLIENT])
def test_both_checkpoints_are_named(state: MemberState, role: Role) -> None:
    joining = member(MemberState.JOINING, OWN)
    balancer = member(MemberState.SERVING, None, Role.BALANCER)
    with pytest.raises(ClusterError) as caught:
        refuse_other_checkpoint([joining, balancer, member(state, OTHER, role)], OWN, "host:7000")
    message = str(caught.value)
    assert "host:7000" in message
    assert "qwen3_moe, 2 layers of 16 experts, digest 222222222222" in message
    assert "qwen3_moe, 2 layers of 8 experts, digest 111111111111" in message


@pytest.mark.parametrize(
    "members",
    [
        [],
        # The balancer may still choose either.
        [member(MemberState.JOINING, OTHER), member(MemberState.SUSPECT, OTHER)],
        [member(MemberState.DEAD, OTHER), member(MemberState.LEFT, OTHER)],
        [member(MemberState.SERVING, OTHER), member(MemberState.SERVING, OWN)],
        [member(MemberState.SERVING, None, Role.ATTENTION_CLIENT)],
    ],
)
def test_a_cluster_that_may_have_the_checkpoint(members: list[Member]) -> None:
    refuse_other_checkpoint(members, OWN, "host:7000")
