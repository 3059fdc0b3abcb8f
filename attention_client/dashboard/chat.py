"""The chat box: an answer that streams, and which servers computed each of its tokens."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import aclosing
from html import escape

from nicegui import ui

from attention_client.dashboard.talk import Piece, Talk
from attention_client.serve.errors import ApiError

__all__ = ["ChatBox"]

# Text is sent to the browser so often at most.
_FLUSH_S = 0.1
_COLOURS = 8
_MOST_TOKENS = 4096


class ChatBox:
    """One viewer's chat box; made within a page.

    Args:
        talk: Asks the model.
        servers: The names of the expert servers now, in order: the order gives the colours.
    """

    def __init__(self, talk: Talk, servers: Callable[[], Sequence[str]]) -> None:
        self._talk = talk
        self._servers = servers
        self._task: asyncio.Task[None] | None = None
        self._pairs: Counter[str] = Counter()
        self._names: list[str] = []
        with ui.element("div").classes("chat-line"):
            self._input = (
                ui.input("Message", value="Tell me about the sea.")
                .props('outlined dense data-part="message"')
                .on("keydown.enter", self._send)
            )
            self._tokens = (
                ui.number("Tokens at most", value=128, min=1, max=_MOST_TOKENS, precision=0)
                .props("outlined dense")
                .style("width: 9em")
            )
            self._button = ui.button("Send", on_click=self._send).props("no-caps unelevated")
            self._end = ui.button("End", on_click=self.end).props("no-caps outline")
            self._end.disable()
        self._answer = (
            ui.element("div")
            .classes("answer")
            .props(
                'role="log" aria-live="polite" aria-label="Answer" tabindex="0" data-part="answer"'
            )
        )
        self._legend = ui.html("", sanitize=False).props('data-part="answer-servers"')

    def end(self) -> None:
        """Ends the answer that is being generated, if there is one."""
        if self._task is not None:
            self._task.cancel()

    def _send(self) -> None:
        text = str(self._input.value or "").strip()
        if not text or self._task is not None:
            return
        tokens = min(max(int(self._tokens.value or 1), 1), _MOST_TOKENS)
        self._answer.clear()
        self._pairs.clear()
        self._names = list(self._servers())
        self._legend.set_content("")
        self._button.disable()
        self._end.enable()
        self._task = asyncio.get_running_loop().create_task(self._stream(text, tokens))

    async def _stream(self, text: str, tokens: int) -> None:
        pieces: list[Piece] = []
        flusher = asyncio.get_running_loop().create_task(self._flush_often(pieces))
        try:
            async with aclosing(self._talk.answer(text, tokens)) as answer:  # type: ignore[type-var]
                async for piece in answer:
                    pieces.append(piece)
        except ApiError as error:
            pieces.append(Piece(error=str(error)))
        finally:
            flusher.cancel()
            self._flush(pieces)
            self._task = None
            if not self._answer.is_deleted:
                self._button.enable()
                self._end.disable()

    async def _flush_often(self, pieces: list[Piece]) -> None:
        while True:
            await asyncio.sleep(_FLUSH_S)
            self._flush(pieces)

    def _flush(self, pieces: list[Piece]) -> None:
        """Shows what has come since the last time; what was shown stays in the browser as it is."""
        if not pieces or self._answer.is_deleted:
            return
        shown = "".join(map(self._span, pieces))
        pieces.clear()
        with self._answer:
            ui.html(shown, sanitize=False, tag="span")
        self._legend.set_content(self._summary())

    def _span(self, piece: Piece) -> str:
        if piece.error:
            return f'<span class="failed"> The answer broke off: {escape(piece.error)}</span>'
        if not piece.servers:
            return f"<span>{escape(piece.text)}</span>"
        self._pairs.update(piece.servers)
        most = max(piece.servers, key=lambda name: piece.servers[name])
        whole = sum(piece.servers.values())
        title = ", ".join(f"{s} {n / whole:.0%}" for s, n in sorted(piece.servers.items()))
        return (
            f'<span class="t t{self._colour(most)}" data-servers="{escape(" ".join(piece.servers))}" '
            f'title="computed by {escape(title)}">{escape(piece.text)}</span>'
        )

    def _colour(self, server: str) -> int:
        if server not in self._names:
            self._names.append(server)
        return self._names.index(server) % _COLOURS

    def _summary(self) -> str:
        """Who computed how much of the answer: the colours' legend, and all of it for a screen reader."""
        whole = sum(self._pairs.values())
        items = "".join(
            f'<span><span class="key k{self._colour(name)}"></span>{escape(name)} '
            f"{pairs / whole:.0%}</span>"
            for name, pairs in sorted(self._pairs.items())
        )
        return f'<div class="servers-of-answer">{items}</div>'
