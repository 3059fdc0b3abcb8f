"""The batch script for Slurm: its syntax, its commands, and its loop around a role."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import typer

from eaas.config import ExpertServerConfig

SCRIPT = Path(__file__).parents[3] / "deploy" / "slurm" / "eaas.sbatch"
TEXT = SCRIPT.read_text()
ROLES = ("monitor", "balancer", "expert-server", "attention-client", "frontend")


def test_bash_reads_it() -> None:
    done = subprocess.run(["bash", "-n", SCRIPT], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_shellcheck() -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("needs shellcheck")
    words = ["shellcheck", "--severity=warning", str(SCRIPT)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


def commands() -> dict[str, list[str]]:
    """Options that the script gives to each command of `eaas`."""
    text = re.sub(r"\\\n", " ", TEXT)
    found = {}
    for line in text.splitlines():
        # keep eaas ROLE, "${run[@]}" ROLE (which ends in `eaas`), eaas certs
        match = re.search(r'(?:^|\s)(?:eaas|"\$\{run\[@\]\}") ([a-z-]+) (.*)', line)
        if match and not line.lstrip().startswith(("#", "echo")):
            found[match[1]] = re.findall(r"(?<=\s)--[a-z-]+", " " + match[2])
    return found


def test_commands_are_those_of_the_program() -> None:
    from eaas_cli.commands import app

    known = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    given = commands()
    assert given.keys() == {*ROLES, "certs"}
    for command, options in given.items():
        assert options
        assert {*options} <= {p.opts[0] for p in known[command].params}, command
    assert 'bash -c "$functions; keep \\"\\$@\\"" keep eaas)' in TEXT


def test_members_listen_for_other_machines_with_certificates_and_keys() -> None:
    """As docs/security.md requires beyond loopback."""
    given = commands()
    hosts = {"--host", "--engine-host"}
    assert all(hosts & {*given[role]} for role in ROLES)
    assert "--api-key-file" in given["frontend"]
    assert "export EAAS_SECURITY__TLS_DIR=" in TEXT
    assert "--insecure" not in TEXT
    assert "umask 077" in TEXT


def test_the_time_before_the_limit_is_enough_to_drain() -> None:
    (seconds,) = re.findall(r"^#SBATCH --signal=B:TERM@(\d+)$", TEXT, re.MULTILINE)
    assert int(seconds) > ExpertServerConfig().drain_timeout_s + 20


@pytest.mark.parametrize(
    ("ends", "status", "lives"),
    [
        ("[[ $(wc -l < lives) == 3 ]]", 0, 3),
        # A role that always fails is given up.
        ("exit 2", 2, 6),
        # Slurm sends it to both; a role that it ends in disorder does not start again.
        ("kill -TERM $PPID; exit 1", 0, 1),
    ],
)
def test_a_role_that_fails_starts_again_until_it_is_drained(tmp_path, ends, status, lives) -> None:
    """The script's loop around a role, with a role of ours."""
    begin = TEXT.index("keep() {")
    function = TEXT[begin : TEXT.index("\n}\n", begin) + 3]
    role = f"bash -c 'echo x >> lives; {ends}'"
    script = f"{function}\nsleep() {{ :; }}\ncd {tmp_path}\nkeep {role}"
    environment = {"SLURMD_NODENAME": "node1", "PATH": "/usr/bin:/bin"}
    words = ["bash", "-c", script]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == status
    assert (tmp_path / "lives").read_text().count("x") == lives
    assert done.stderr.count("starts again") == lives - 1
