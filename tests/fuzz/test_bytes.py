"""Arbitrary bytes as slots, frames, chunks and messages of the contract. The corpus holds former failures.

`make fuzz` runs longer; a failure there is minimised, fixed and added to the corpus.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from eaas.rpc.v1 import common_pb2
from fuzz_targets import TARGETS, seeds

CORPUS = Path(__file__).with_name("corpus")
SECONDS = float(os.environ.get("FUZZ_SECONDS", "1"))
SEEDS = {name: [data for target, _, data in seeds() if target == name] for name in TARGETS}


@pytest.mark.parametrize("name", TARGETS)
def test_the_corpus(name: str) -> None:
    files = sorted((CORPUS / name).iterdir())
    assert files
    for file in files:
        TARGETS[name](file.read_bytes())


def test_the_corpus_has_every_valid_seed() -> None:
    for target, name, data in seeds():
        file = CORPUS / target / name
        assert file.read_bytes() == data, f"the format changed: write {file} anew"


@st.composite
def damaged(draw: st.DrawFn, name: str) -> bytes:
    """A valid input with some bytes changed, inserted or removed."""
    data = bytearray(draw(st.sampled_from(SEEDS[name])))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(data)))
        piece = draw(st.binary(max_size=8) | st.just(b"\xff" * 8))
        data[at : at + draw(st.sampled_from((0, len(piece))))] = piece
    return bytes(data)


@pytest.mark.parametrize("name", TARGETS)
def test_any_bytes(name: str) -> None:
    @given(st.binary(max_size=400) | damaged(name))
    @example(b"")
    def check(data: bytes) -> None:
        TARGETS[name](data)

    check()


@pytest.mark.parametrize(
    ("layers", "experts", "servers"),
    [(2**32 - 1, 2**32 - 1, 1), (1, 2**32 - 1, 1), (2**32 - 1, 1, 0), (2**16, 2**16, 1)],
)
def test_a_placement_that_claims_to_be_huge_takes_no_memory(
    layers: int, experts: int, servers: int
) -> None:
    from eaas.types import Placement

    message = common_pb2.Placement(epoch=1, num_layers=layers, num_experts=experts)
    for _ in range(servers):
        message.servers.add(server_id="s").layers.add()
    with pytest.raises(ValueError, match="placement"):
        Placement.from_proto(message)


@pytest.mark.nightly
@pytest.mark.parametrize("name", TARGETS)
def test_atheris(name: str, tmp_path: Path) -> None:
    """Coverage-guided fuzzing for FUZZ_SECONDS."""
    if importlib.util.find_spec("atheris") is None:
        pytest.skip("needs atheris: pip install 'expert-as-a-service[fuzz]'")
    new = tmp_path / "new"
    new.mkdir()
    options = (
        f"-max_total_time={max(1, round(SECONDS))}",
        "-max_len=2048",
        "-rss_limit_mb=4096",
        f"-artifact_prefix={tmp_path}/",
    )
    done = subprocess.run(
        [sys.executable, "-m", "fuzz_run", name, *options, str(new), str(CORPUS / name)],
        capture_output=True,
        text=True,
        timeout=SECONDS + 60,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "Done " in done.stderr, done.stderr[-2000:]
