"""Rows 28 and 36 of the fault contract: processes that must refuse to start. Each test quotes its row."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
import torch
from safetensors.torch import load_file, save_file

from control_plane import Plane
from eaas.config import MonitorConfig, load_config
from eaas.errors import EaasError
from eaas.membership.session import MemberSession, Report
from eaas.types import Member, MemberState, ModelShape, Role
from eaas_cli.local import LocalCluster
from eaas_cli.local.fork_server import ForkServer
from eaas_cli.local.process import ChildProcess
from monitor.main import Monitor
from quantized_checkpoint import SCHEMES, quantized_copy
from refusals import refusal

pytestmark = pytest.mark.integration

PATIENCE_S = 100
EAAS = (sys.executable, "-m", "eaas_cli")


@pytest.fixture(scope="module")
def monitor_address() -> Iterator[str]:
    monitor = Monitor(MonitorConfig())
    yield monitor.address
    monitor.stop()


@pytest.fixture
def taken() -> Iterator[int]:
    """A port of a gRPC server that shares it with others, as gRPC does by default."""
    with ThreadPoolExecutor(1) as workers:
        server = grpc.server(workers, options=(("grpc.so_reuseport", 1),))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield port
        server.stop(0).wait()


@pytest.fixture
def refused(fork_server: ForkServer, checkpoint: Callable[..., Path]) -> Callable[..., str]:
    """Start a role's process, which must refuse; return why."""

    def start(role: str, monitor_address: str, *more: str) -> str:
        join = () if role == "monitor" else ("--join", monitor_address)
        model = ("--model", str(checkpoint())) if role in ("expert-server", "frontend") else ()
        arguments = (role, *join, *model, *more)
        return refusal(ChildProcess(role, arguments, None, fork_server=fork_server))

    return start


def test_a_kernel_that_contradicts_the_device_is_refused(
    refused: Callable[..., str], monitor_address: str
) -> None:
    why = refused("expert-server", monitor_address, "--device", "cuda:0", "--kernel", "native")
    assert "expert_server.device is cuda:0: give --kernel auto or --device cpu" in why


@pytest.mark.parametrize("role", ["monitor", "balancer", "expert-server", "frontend"])
def test_row_36_a_port_that_is_bound_is_named(
    role: str, refused: Callable[..., str], monitor_address: str, taken: int
) -> None:
    """Row 36: port already bound: start fails loudly (a second gRPC server binds the same port silently
    unless `so_reuseport` is 0).
    """
    why = refused(role, monitor_address, "--port", str(taken))
    assert why.startswith(f"127.0.0.1:{taken} is in use")


def written(file: str, text: str) -> Callable[[Path], object]:
    return lambda model: (model / file).write_text(text)


def removed(pattern: str) -> Callable[[Path], object]:
    """Remove the first file of a pattern."""
    return lambda model: min(model.glob(pattern)).unlink()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (removed("config.json"), "config.json"),
        (removed("*.safetensors"), "complete the download"),
        (removed("tokenizer.json"), "tokenizer"),
        (
            written("tokenizer_config.json", '{"added_tokens_decoder": null}'),
            "tokenizer_config.json: added_tokens_decoder is null",
        ),
        (written("tokenizer.json", '{"model": '), "tokenizer.json is not JSON"),
        (written("chat_template.jinja", "{% if %}"), "chat_template.jinja: line 1: "),
        (
            written("generation_config.json", '{"do_sample": true, "temperature": "hot"}'),
            "generation_config.json: temperature",
        ),
        (written("config.json", '\ufeff{"model_type": "qwen3_moe"}'), "byte order mark"),
    ],
)
def test_files_that_cannot_be_served_are_named_before_any_process_starts(
    checkpoint: Callable[..., Path], tmp_path: Path, damage: Callable[[Path], object], words: str
) -> None:
    model = Path(shutil.copytree(checkpoint(), tmp_path / "copy"))
    damage(model)
    with pytest.raises(EaasError) as caught:
        LocalCluster(model)
    assert str(caught.value).startswith(str(model))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def small_shared_memory(free: int) -> tuple[str, ...]:
    """A command prefix that gives a program its own /dev/shm of that many bytes."""
    script = f'mount -t tmpfs -o size={free},mode=1777 tmpfs /dev/shm && exec "$@"'
    root = () if os.getuid() == 0 else ("--map-root-user",)
    return ("unshare", *root, "--mount", "sh", "-c", script, "sh")


def can_mount() -> bool:
    try:
        done = subprocess.run(
            [*small_shared_memory(4096), "true"],
            capture_output=True,
            timeout=PATIENCE_S,
            check=False,
        )
    except FileNotFoundError:
        return False
    return done.returncode == 0


@pytest.mark.skipif(not can_mount(), reason="cannot make a mount namespace")
@pytest.mark.parametrize("pages", [pytest.param(1, marks=pytest.mark.nightly), 4])
def test_row_28_shared_memory_is_full(
    checkpoint: Callable[..., Path], monitor_address: str, pages: int
) -> None:
    """Row 28: shared memory full: clear error at start with what was asked and what is free; never
    SIGBUS.
    """
    free = pages * os.sysconf("SC_PAGE_SIZE")
    words = ("expert-server", "--join", monitor_address, "--model", str(checkpoint()))
    done = subprocess.run(
        [*small_shared_memory(free), *EAAS, *words, "--kernel", "reference"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 2, (done.returncode, done.stderr)
    last = done.stderr.strip().splitlines()[-1]
    told = re.search(r"/dev/shm: asked for (\d+) bytes, (\d+) are free", last)
    assert told is not None, done.stderr
    assert int(told[1]) > int(told[2]) < free


JOINS = ("--join", "127.0.0.1:1")


COMMANDS = (
    ("up", "--model"),
    ("attention-client", *JOINS, "--model"),
    ("frontend", *JOINS, "--model"),
    ("vllm", *JOINS),
    ("trace", "record", "x.npz", "--model"),
    ("bench", "serve", "--model"),
    ("chaos", "run", "--model"),
)
WRONG = ("no tokenizer.json", "no layer with experts", "hf download")


@pytest.mark.parametrize(
    ("words", "what"),
    [
        # Each command and each reason in every run, the others at night.
        pytest.param(words, what, marks=[pytest.mark.nightly] * (row > 0 and column > 0))
        for row, words in enumerate(COMMANDS)
        for column, what in enumerate(WRONG)
    ],
)
def test_a_checkpoint_is_refused_before_the_libraries_are_imported(
    checkpoint: Callable[..., Path], tmp_path: Path, words: tuple[str, ...], what: str
) -> None:
    model = Path(shutil.copytree(checkpoint("qwen3_moe"), tmp_path / "model"))
    if what == "no tokenizer.json":
        (model / "tokenizer.json").unlink()
    elif what == "no layer with experts":
        (model / "config.json").write_text(json.dumps({"model_type": "llama"}))
        (model / "model.safetensors.index.json").unlink(missing_ok=True)
        save_file({"a": torch.zeros(1)}, model / "model.safetensors")
    else:
        model = Path("org/demo")
    # A start that imports one of them first ends with a traceback.
    for library in ("torch", "transformers"):
        (tmp_path / f"{library}.py").write_text("raise ImportError")
    done = subprocess.run(
        [sys.executable, "-c", "import eaas_cli; eaas_cli.main()", *words, str(model)],
        env=os.environ | {"HF_HOME": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"eaas: error: {model}")
    assert what in line


def test_a_server_with_another_checkpoint_ends(
    plane: Plane, checkpoint: Callable[..., Path], refused: Callable[..., str]
) -> None:
    address = plane.monitor().address
    shape = ModelShape("mixtral", 4, 64, 2, ("a", "b"), "float32", "0" * 64)
    serving = MemberState.SERVING
    other = Member("other", Role.EXPERT_SERVER, os.getpid(), "here", "", serving, model=shape)
    plane.stack.callback(MemberSession(address, other, report=lambda: Report(serving)).close)
    why = refused("expert-server", address)
    assert why.startswith(f"{checkpoint()}: the cluster at {address} serves another")
    assert "mixtral, 2 layers of 4 experts, digest 000000000000" in why
    assert "qwen3_moe, 3 layers of 8 experts, digest " in why


def damage_scales(model: Path) -> str:
    file = model / "model.safetensors"
    tensors = load_file(file)
    name = next(key for key in tensors if ".experts.3." in key and key.endswith("_scale_inv"))
    tensors[name].view(-1)[0] = float("nan")
    save_file(tensors, file, {"format": "pt"})
    return f"tensor {name.removesuffix('_scale_inv')}: a scale is NaN or infinite"


def another_variant(model: Path) -> str:
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"]["fmt"] = "e5m2"
    (model / "config.json").write_text(json.dumps(config))
    return "fp8 with fmt 'e5m2' is not supported (supported: e4m3)"


def shared_memory() -> set[str]:
    """Names in shared memory, without the semaphores of Python's own processes, which come and go."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-")}


def cut_shard(model: Path) -> str:
    file = model / "model.safetensors"
    os.truncate(file, file.stat().st_size - 1000)
    return "(truncated)"


@pytest.mark.parametrize("damage", [damage_scales, another_variant, cut_shard])
def test_a_damaged_quantised_checkpoint_ends_the_start_with_one_line(
    damage: Callable[[Path], str],
    checkpoint: Callable[..., Path],
    start_cluster: Callable[..., LocalCluster],
    tmp_path: Path,
) -> None:
    before = shared_memory()
    quantized_copy(checkpoint("qwen3_moe"), tmp_path / "m", SCHEMES["fp8"])
    what = damage(tmp_path / "m")
    with pytest.raises(EaasError) as caught:
        start_cluster(tmp_path / "m")
    assert what in str(caught.value)
    assert "\n" not in str(caught.value)
    assert shared_memory() <= before


def test_quantised_twice_is_refused(
    checkpoint: Callable[..., Path], start_cluster: Callable[..., LocalCluster], tmp_path: Path
) -> None:
    quantized_copy(checkpoint("qwen3_moe"), tmp_path / "m", SCHEMES["fp8"])
    config = load_config(frontend={"port": 0}, expert_server={"quantization": "int8"})
    with pytest.raises(EaasError, match="the checkpoint is quantised, its experts are fp8"):
        start_cluster(tmp_path / "m", clients=0, config=config)
