"""`eaas top`: a live view of a cluster in the terminal."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from eaas.net.api_keys import authorization
from eaas_cli.commands.options import DEFAULT_ENDPOINT, Endpoint, Json, KeyToShow, Tls
from eaas_cli.commands.servers import monitor_addresses, operator
from eaas_cli.endpoint import fetch_status

if TYPE_CHECKING:
    from rich.console import Console

    from eaas.cluster_snapshot import ClusterSnapshot, SnapshotReader

__all__ = ["top"]

_POLL_S = 1.0
# Lines of a frame in a pipe, which has no height.
_PIPED_LINES = 1000


def top(
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and exit.")] = False,
    key_file: KeyToShow = None,
    tls: Tls = None,
    as_json: Json = False,
) -> None:
    """Show members, load, token rates and events, updated every second. q quits.

    Outside a terminal it prints one frame and exits.
    """
    from rich.console import Console

    from eaas.cluster_snapshot.document import document, encode
    from eaas.cluster_snapshot.remote import remote_reader
    from eaas_cli.commands.top_view import COLUMNS, frame

    status = fetch_status(endpoint, key_file)
    url = str(status["endpoint"]).removesuffix("/v1")
    console = Console()
    with remote_reader(
        ",".join(monitor_addresses(endpoint, status)),
        endpoint,
        authorization(key_file),
        operator(endpoint, status, tls),
    ) as reader:
        if console.is_terminal and not (once or as_json):
            _live(url, reader, console)
            return
        snapshot = _second_snapshot(reader)
    if as_json:
        typer.echo(encode({"endpoint": url} | document(snapshot)))
        return
    if not console.is_terminal:
        console = Console(width=COLUMNS)
    lines = console.height if console.is_terminal else _PIPED_LINES
    ascii_only = console.options.ascii_only
    console.print(frame(url, snapshot, lines, ascii_only=ascii_only))


def _second_snapshot(reader: SnapshotReader) -> ClusterSnapshot:
    """Take the only snapshot of a run that prints one, from a second poll: rates need two polls.

    The first poll also finds the balancer.
    """
    reader.look()
    time.sleep(_POLL_S)
    return reader.look()


def _live(url: str, reader: SnapshotReader, console: Console) -> None:
    """Draw frames in the terminal until a key ends it. A thread polls the cluster, so keys act at once."""
    from rich.live import Live

    from eaas_cli.commands.top_view import frame

    over = threading.Event()
    failed: list[BaseException] = []
    # One byte per poll wakes the loop that waits for keys.
    polled, notify = os.pipe()

    def poll() -> None:
        try:
            while not over.is_set():
                reader.look()
                os.write(notify, b".")
                over.wait(_POLL_S)
        except BaseException as error:  # noqa: BLE001 (raised again in the main thread)
            failed.append(error)
            os.write(notify, b".")

    poller = threading.Thread(target=poll, name="top", daemon=True)
    try:
        with _keys() as keyboard, Live(console=console, screen=True, auto_refresh=False) as live:
            poller.start()
            while not failed:
                ready, _, _ = select.select([polled, *keyboard], [], [])
                if any(_ends(os.read(key, 64)) for key in ready if key != polled):
                    return
                if polled in ready:
                    os.read(polled, 64)
                    live.update(
                        frame(
                            url,
                            reader.snapshot,
                            console.height,
                            ascii_only=console.options.ascii_only,
                        ),
                        refresh=True,
                    )
        raise failed[0]
    except KeyboardInterrupt:
        return
    finally:
        over.set()
        if poller.is_alive():
            poller.join()
        os.close(polled)
        os.close(notify)


def _ends(pressed: bytes) -> bool:
    """Whether the keys end `eaas top`: q, Ctrl-D or the end of the terminal."""
    return not pressed or any(key in b"qQ\x04" for key in pressed)


@contextlib.contextmanager
def _keys() -> Iterator[list[int]]:
    """Yield the keyboard's descriptor in cbreak mode, in a list; the list is empty without a terminal."""
    try:
        import termios
        import tty

        keyboard = sys.stdin.fileno()
        before = termios.tcgetattr(keyboard)
    except (ValueError, OSError, termios.error):
        yield []
        return
    try:
        # In cbreak mode Ctrl-C stays a signal.
        tty.setcbreak(keyboard)
        yield [keyboard]
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)
