"""`eaas top`: a cluster in a terminal, as it is now."""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from eaas.api_keys import authorization
from eaas.cli.client import DEFAULT_ENDPOINT, fetch_status
from eaas.cli.options import Endpoint, Json, KeyToShow, Tls
from eaas.cli.servers import operator
from eaas.errors import ClusterError
from eaas.types import MemberState, Role

if TYPE_CHECKING:
    from rich.console import Console

    from eaas.facts import Facts, FactsReader

__all__ = ["register"]

_LOOK_S = 1.0
# Piped, there is no height to fit into.
_PIPED_LINES = 1000


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("top")(top)


def top(
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    once: Annotated[bool, typer.Option("--once", help="Show one frame and end.")] = False,
    key_file: KeyToShow = None,
    tls: Tls = None,
    as_json: Json = False,
) -> None:
    """Show what a cluster does, from second to second: members, load, tokens, events. q ends it.

    Not in a terminal, it shows one frame and ends.
    """
    from rich.console import Console

    from eaas.cli.top_view import COLUMNS, document, frame
    from eaas.facts.remote import remote_reader

    status = fetch_status(endpoint, key_file)
    url = str(status["endpoint"]).removesuffix("/v1")
    monitors = [
        m["address"]
        for m in status["members"]
        if m["role"] == Role.MONITOR.value and not MemberState(m["state"]).is_gone
    ]
    if not monitors:
        raise ClusterError(f"{endpoint}: no monitor is in the cluster, so there is nobody to ask")
    console = Console()
    with remote_reader(
        ",".join(monitors), endpoint, authorization(key_file), operator(tls)
    ) as reader:
        if console.is_terminal and not (once or as_json):
            _live(url, reader, console)
            return
        facts = _two_looks(reader)
    if as_json:
        typer.echo(json.dumps(document(url, facts)))
        return
    if not console.is_terminal:
        console = Console(width=COLUMNS)
    lines = console.height if console.is_terminal else _PIPED_LINES
    ascii_only = console.options.ascii_only
    console.print(frame(url, facts, lines, ascii_only=ascii_only))


def _two_looks(reader: FactsReader) -> Facts:
    """Rates and shares of time need two; the balancer is found in the first."""
    reader.look()
    time.sleep(_LOOK_S)
    return reader.look()


def _live(url: str, reader: FactsReader, console: Console) -> None:
    """Frames until somebody has seen enough. Looking is done aside: keys are heard at once."""
    from rich.live import Live

    from eaas.cli.top_view import frame

    over = threading.Event()
    failed: list[BaseException] = []
    # A byte for each look: the one that waits for keys wakes for it, too.
    told, tell = os.pipe()

    def look() -> None:
        try:
            while not over.is_set():
                reader.look()
                os.write(tell, b".")
                over.wait(_LOOK_S)
        except BaseException as error:  # noqa: BLE001 (raised again where the person is)
            failed.append(error)
            os.write(tell, b".")

    looker = threading.Thread(target=look, name="top", daemon=True)
    try:
        with _keys() as keyboard, Live(console=console, screen=True, auto_refresh=False) as live:
            looker.start()
            while not failed:
                ready, _, _ = select.select([told, *keyboard], [], [])
                if any(_ends(os.read(key, 64)) for key in ready if key != told):
                    return
                if told in ready:
                    os.read(told, 64)
                    live.update(
                        frame(
                            url, reader.facts, console.height, ascii_only=console.options.ascii_only
                        ),
                        refresh=True,
                    )
        raise failed[0]
    except KeyboardInterrupt:
        return
    finally:
        over.set()
        if looker.is_alive():
            looker.join()
        os.close(told)
        os.close(tell)


def _ends(pressed: bytes) -> bool:
    """q, Ctrl-D, or that the terminal is gone."""
    return not pressed or any(key in b"qQ\x04" for key in pressed)


@contextlib.contextmanager
def _keys() -> Iterator[list[int]]:
    """The keyboard, each key as it is pressed and not shown; nothing where there is none."""
    try:
        import termios
        import tty

        keyboard = sys.stdin.fileno()
        before = termios.tcgetattr(keyboard)
    except (ValueError, OSError, termios.error):
        yield []
        return
    try:
        # Ctrl-C stays a signal.
        tty.setcbreak(keyboard)
        yield [keyboard]
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)
