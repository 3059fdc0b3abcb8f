"""Install into a virtual environment with uv; a CPU build of torch from PyTorch's index, where that answers.

python3 deploy/install.py VENV ARGUMENTS_OF_UV_PIP_INSTALL...

The environment is made if it does not exist. pip installs uv, into a temporary directory, and uv reads pip's
configuration from here: indexes, local wheels, certificates and proxies are the user's. TORCH_INDEX in the
environment names a mirror of PyTorch's index; empty: torch comes from the other indexes.
"""

from __future__ import annotations

import ast
import os
import shutil
import ssl
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import urllib.request
from collections.abc import Mapping, Sequence
from http.client import HTTPException
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
_PATIENCE_S = 5.0
# pip's settings, and uv's options for them. Those with several values separate them by white space.
_OPTIONS = {
    "index-url": "--default-index",
    "extra-index-url": "--index",
    "find-links": "--find-links",
    "constraint": "--constraints",
    "trusted-host": "--allow-insecure-host",
    "cert": "--cert",
    "no-index": "--no-index",
}


def main(venv: Path, arguments: Sequence[str]) -> None:
    """Make the environment and install; a machine that lacks something ends this with one line."""
    began = time.monotonic()
    python = venv / "bin/python"
    # An image has an environment without pip, and pip beside it. Where an interrupted set-up left neither,
    # the environment is made again.
    pythons = [str(python), sys.executable] if python.exists() else []
    pip = next((found for each in pythons if _works(found := [each, "-m", "pip"])), None)
    refuse_unfit_machine(makes_environment=pip is None)
    if pip is None:
        _run([sys.executable, "-m", "venv", str(venv)])
        pip = [str(python), "-m", "pip"]
    settings = pip_settings(_output([*pip, "config", "list"]))
    options = uv_options(settings)
    index = "" if "--no-index" in options else os.environ.get("TORCH_INDEX", TORCH_INDEX)
    has_cpu_builds = bool(index) and answers(index, settings)
    print(source_of_torch(index, has_cpu_builds), flush=True)
    # uv takes a package whose files it was linking when it was killed for complete.
    unfinished = venv / ".unfinished"
    again = ["--reinstall"] if unfinished.exists() else []
    unfinished.touch()
    with tempfile.TemporaryDirectory() as tools:
        quiet = ["--quiet", "--disable-pip-version-check", "--root-user-action=ignore", "--target"]
        _run([*pip, "install", *quiet, tools, "-c", str(ROOT / "constraints.txt"), "uv"])
        command = [f"{tools}/bin/uv", "pip", "install", "--no-config", "--system-certs"]
        command += ["--python", str(python), "--index-strategy", "unsafe-best-match"]
        if not sys.stderr.isatty():
            command.append("--quiet")
        if has_cpu_builds:
            command += ["--index", index]
        done = subprocess.run(
            [*command, *again, *options, *arguments], env=os.environ | uv_variables(settings)
        )
    if done.returncode:
        where = index or TORCH_INDEX
        hint = "" if has_cpu_builds else f"; if torch with +cpu is missing: {where} has it"
        sys.exit(f"{venv}: the installation failed, see above{hint}")
    unfinished.unlink()
    print(f"{venv}: installed in {time.monotonic() - began:.0f} s", flush=True)


def refuse_unfit_machine(makes_environment: bool) -> None:
    """Exit with one line if Python is too old, or if venv, a compiler or C headers are missing."""
    if sys.version_info < (3, 11):  # noqa: UP036 (an older Python may run this file)
        sys.exit("Python 3.11 or newer is needed: make PYTHON=python3.11 ...")
    missing = []
    if makes_environment and find_spec("ensurepip") is None:
        missing.append("python3-venv")
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        missing.append("python3-dev")
    if not any(map(shutil.which, [*os.environ.get("CC", "").split()[:1], "gcc"])):
        missing.append("gcc libc6-dev")
    if missing:
        names = " ".join(missing)
        sys.exit(f"this machine lacks {names}; on Debian and Ubuntu: sudo apt-get install {names}")


def answers(index: str, settings: Mapping[str, Sequence[str]]) -> bool:
    """Whether an index answers in a few seconds, with pip's settings, and has builds of torch."""
    found: list[bool] = []
    asking = threading.Thread(target=lambda: found.append(_has_torch(index, settings)), daemon=True)
    asking.start()
    # The look-up of a name has no deadline of its own.
    asking.join(_PATIENCE_S)
    return found == [True]


def source_of_torch(index: str, has_cpu_builds: bool) -> str:
    """Say in one line where torch comes from, and what that costs."""
    if has_cpu_builds:
        return f"torch: the CPU build of {index}"
    if not index:
        return "torch: as pip's configuration finds it; from the public index on x86 4 GB larger, for CUDA"
    return (
        f"torch: {index} does not answer, so it comes as pip's configuration finds it; from the public index "
        "on x86 that is 4 GB larger, for CUDA (TORCH_INDEX=URL names a mirror)"
    )


def pip_settings(listed: str) -> dict[str, list[str]]:
    """Read the output of `pip config list`; a file nearer to the user, and then the environment, overrides.

    `pip install`'s own section overrides the global one.
    """
    nearest = ("global", "install", ":env:")
    found: dict[tuple[int, str], list[str]] = {}
    for line in listed.splitlines():
        name, _, value = line.partition("=")
        section, _, key = name.rpartition(".")
        if section in nearest and value:
            found[nearest.index(section), key] = str(ast.literal_eval(value)).split()
    return {key: found[place, key] for place, key in sorted(found)}


def uv_options(settings: Mapping[str, Sequence[str]]) -> list[str]:
    """Translate pip's settings into options of uv."""
    options: list[str] = []
    for name, option in _OPTIONS.items():
        for value in settings.get(name, ()):
            if option == "--no-index":
                options += [option] if value.lower() in ("1", "true", "yes", "on") else []
            else:
                options += [option, value]
    return options


def uv_variables(settings: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Translate those of pip's settings for which uv has variables of the environment alone."""
    variables = {
        "default-timeout": ["UV_HTTP_TIMEOUT"],
        "timeout": ["UV_HTTP_TIMEOUT"],
        "proxy": ["HTTP_PROXY", "HTTPS_PROXY"],
    }
    return {
        variable: settings[name][0]
        for name, names in variables.items()
        if name in settings
        for variable in names
    }


def _has_torch(index: str, settings: Mapping[str, Sequence[str]]) -> bool:
    handlers: list[urllib.request.BaseHandler] = []
    try:
        for file in settings.get("cert", ()):
            context = ssl.create_default_context(cafile=file)
            handlers.append(urllib.request.HTTPSHandler(context=context))
        for proxy in settings.get("proxy", ()):
            handlers.append(urllib.request.ProxyHandler({"http": proxy, "https": proxy}))
        opener = urllib.request.build_opener(*handlers)
        with opener.open(f"{index.rstrip('/')}/torch/", timeout=_PATIENCE_S) as page:
            return any(b"torch-" in line for line in page)
    except (
        OSError,
        HTTPException,
        ValueError,
    ):  # no answer, a refusal, another protocol, or no URL
        return False


def _run(command: Sequence[str]) -> None:
    if status := subprocess.run(command).returncode:
        sys.exit(status)


def _works(pip: Sequence[str]) -> bool:
    return subprocess.run([*pip, "--version"], capture_output=True).returncode == 0


def _output(command: Sequence[str]) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(done.returncode)
    return done.stdout


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    try:
        main(Path(sys.argv[1]), sys.argv[2:])
    except KeyboardInterrupt:
        sys.exit(130)
