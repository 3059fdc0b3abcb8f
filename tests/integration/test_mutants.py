"""Small faults in the compiled data path, built in one at a time: each is noticed by a test."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from working_copy import working_copy

pytestmark = [pytest.mark.integration, pytest.mark.nightly, pytest.mark.timeout(1200)]

SWITCH = Path("eaas/wire/mutant.h")
CLIENT = "tests/unit/attention_client"
EXCHANGE = f"{CLIENT}/exchange"
CALLS = f"{EXCHANGE}/test_compiled_calls.py"
SERVER = "tests/unit/expert_server"
LOOP, LONE = f"{SERVER}/test_loop.py", f"{SERVER}/test_lone_requests.py"
CONTRACT = f"{SERVER}/test_contract.py"
REVOKED = (
    f"{LOOP}::test_row_16_a_slot_revoked_while_it_is_computed_is_neither_answered_nor_handed_on"
)

# Number of the fault, what it is, and the tests of which one fails.
MUTANTS = {
    1: ("an answer of another generation", f"{CLIENT}/test_connection.py"),
    2: ("an answer to another request", "tests/sim/test_cluster.py"),
    3: ("an answer of another number of tokens", f"{CLIENT}/test_connection.py"),
    4: ("a request written into another client's slot", f"{CLIENT}/test_connection.py"),
    5: ("a flag written before its request", f"{EXCHANGE}/test_slots.py"),
    6: ("scores of other tokens", f"{EXCHANGE}/test_slots.py"),
    7: ("another client's answer freed", f"{CLIENT}/test_connection.py"),
    8: ("a slot freed twice", CALLS),
    9: ("a late request that nobody notices", f"{CALLS}::test_the_only_server_is_late"),
    10: ("a lost connection that is waited for", f"{CALLS}::test_a_lost_connection_ends_the_wait"),
    11: (
        "a claimed slot whose flag is not read again",
        f"{LOOP}::test_row_16_a_slot_handed_on_before_the_loop_marked_it_is_left_alone",
    ),
    12: (
        "a request larger than its grant",
        f"{LONE}::test_a_request_of_another_size_than_its_grant",
    ),
    13: (
        "a request of another generation",
        f"{CONTRACT}::test_row_16_what_a_former_owner_writes_is_refused_by_its_generation",
    ),
    14: ("a slot released before its reply", REVOKED),
    15: ("a revoked slot's flag overwritten", REVOKED),
    16: ("a client that is not woken", f"{LONE}::test_a_sleeping_client_is_woken"),
    17: (
        "a header that is believed after it changed",
        f"{CONTRACT}::test_row_19_only_what_was_checked_is_believed",
    ),
    18: ("a flag written before its answer", f"{LONE}::test_the_verbs_of_a_request"),
    19: ("a sum in another order", f"{CLIENT}/dispatch/test_parts.py"),
    20: ("each call drawn alike", f"{CLIENT}/dispatch/test_policy.py"),
    21: ("hedges after the least time", f"{CLIENT}/test_budget.py"),
}


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return working_copy(tmp_path_factory.mktemp("clone"))


@pytest.mark.parametrize("number", MUTANTS)
def test_a_fault_is_noticed(clone: Path, number: int) -> None:
    what, tests = MUTANTS[number]
    switch = (clone / SWITCH).read_text().splitlines()
    (at,) = (i for i, line in enumerate(switch) if line.startswith("#define EAAS_MUTANT "))
    switch[at] = f"#define EAAS_MUTANT {number}"
    (clone / SWITCH).write_text("\n".join(switch))
    build = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    subprocess.run(build, cwd=clone, check=True, timeout=300, capture_output=True)
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", tests],
        cwd=clone,
        env=os.environ | {"PYTHONPATH": str(clone), "CLUSTER_SEEDS": "200"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    # 1: a test failed; anything else means that the tests did not run.
    assert ran.returncode == 1, f"not noticed: {what}\n{ran.stdout[-3000:]}"
