"""Set-up: pip's configuration in uv's words, PyTorch's index first, what a machine or an image lacks."""

import os
import shutil
import socket
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from deploy.install import answers, pip_settings, uv_options, uv_variables
from service_box import free_port

ROOT = Path(__file__).parents[3]


@contextmanager
def index(status: int, body: bytes, path: str = "/whl/torch/") -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = status if self.path == path else 404
            self.send_response(found)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/whl"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


WHEEL = b'<a href="torch-2.13.0%2Bcpu-cp311-cp311-linux_x86_64.whl">'


@pytest.mark.parametrize(
    ("status", "body", "is_index"),
    [(200, WHEEL, True), (404, b"", False), (503, b"torch-1", False), (200, b"Sign in", False)],
)
def test_an_index_with_torch_answers(status: int, body: bytes, is_index: bool) -> None:
    with index(status, body) as url:
        assert answers(url, {}) == answers(f"{url}/", {}) == is_index
    for nobody in (url, "", "no URL", "http://[", f"http://127.0.0.1:{free_port()}"):
        assert not answers(nobody, {})


def test_a_server_of_another_protocol_is_no_index() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def greet() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"220 mail.example ESMTP\r\n")

        thread = threading.Thread(target=greet)
        thread.start()
        assert not answers(f"http://127.0.0.1:{port}", {})
        thread.join()


def test_the_index_is_asked_through_pips_proxy() -> None:
    with index(200, b"torch-1", path="http://torch.invalid/whl/torch/") as url:
        proxy = url.removesuffix("/whl")
        assert answers("http://torch.invalid/whl", {"proxy": [proxy]})


def test_the_nearer_of_pips_settings_holds_and_becomes_an_option_of_uv() -> None:
    listed = (
        "global.index-url='https://far.example/simple'\n"
        "global.extra-index-url='https://a.example https://b.example'\n"
        "install.find-links='/wheels\\n/more'\n"
        "install.index-url='https://install.example/simple'\n"
        "list.format='columns'\n"
        ":env:.index-url='https://near.example/simple'\n"
        ":env:.disable-pip-version-check='1'\n"
    )
    settings = pip_settings(listed)
    assert "format" not in settings
    assert uv_options(settings) == [
        *("--default-index", "https://near.example/simple"),
        *("--index", "https://a.example", "--index", "https://b.example"),
        *("--find-links", "/wheels", "--find-links", "/more"),
    ]
    settings = {"default-timeout": ["60"], "proxy": ["http://proxy.example:3128"]}
    proxy = {"HTTP_PROXY": "http://proxy.example:3128", "HTTPS_PROXY": "http://proxy.example:3128"}
    assert uv_variables(settings) == {"UV_HTTP_TIMEOUT": "60", **proxy}
    assert uv_options(settings) == uv_options({"no-index": ["false"]}) == []
    assert uv_options({"no-index": ["1"]}) == ["--no-index"]


def test_a_machine_without_a_compiler_gets_one_line_and_no_environment(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "deploy/install.py", tmp_path / "venv", "--editable", "."],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "apt-get install gcc" in line
    assert os.listdir(tmp_path) == []


def test_an_installation_that_did_not_end_is_done_again_from_the_start(tmp_path: Path) -> None:
    """uv takes a package for complete that it was linking when it was killed."""
    python, uv, log = tmp_path / "venv/bin/python", tmp_path / "uv", tmp_path / "log"
    python.parent.mkdir(parents=True)
    # What pip does here: it has no settings, and puts uv into a directory.
    python.write_text(
        '#!/bin/sh\n[ "$3" = install ] || exit 0\nwhile [ "$1" != --target ]; do shift; done\n'
        f'mkdir -p "$2/bin" && cp {uv} "$2/bin/uv"\n'
    )
    uv.write_text(f'#!/bin/sh\necho "$@" >> {log}\nexit "$STATUS"\n')
    for program in (python, uv):
        program.chmod(0o755)
    for status in (1, 0, 0):
        done = subprocess.run(
            [sys.executable, ROOT / "deploy/install.py", tmp_path / "venv", "six"],
            env=os.environ | {"TORCH_INDEX": "", "STATUS": str(status)},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == status, done.stderr
    assert ["--reinstall" in line for line in log.read_text().splitlines()] == [False, True, False]


def test_the_files_that_the_image_gets_are_enough_to_build(tmp_path: Path) -> None:
    for line in (ROOT / "deploy/Dockerfile.dockerignore").read_text().splitlines():
        if line.startswith("!"):
            source, target = ROOT / line[1:], tmp_path / line[1:]
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.so", "*.pyc"))
            else:
                shutil.copy(source, target)
    # It reads each source, and each header that one includes.
    subprocess.run([sys.executable, "setup.py", "-q", "egg_info"], cwd=tmp_path, check=True)
    [top] = tmp_path.glob("*.egg-info/top_level.txt")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    names = project["tool"]["setuptools"]["packages"]["find"]["include"]
    assert set(top.read_text().split()) == {name.removesuffix("*") for name in names}
