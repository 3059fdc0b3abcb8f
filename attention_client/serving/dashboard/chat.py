"""The dashboard's chat box: a streamed answer with the servers that computed each token's routed experts."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import aclosing

from nicegui import ui

from attention_client.serving.dashboard.chat_source import ChatSource
from attention_client.serving.dashboard.components import Drawn, Press, TextField
from attention_client.serving.dashboard.nodes import Node, encode, h
from eaas.generation.errors import ApiError

__all__ = ["ChatBox"]

# Least time between two updates of the browser.
_FLUSH_S = 0.1
_COLOURS = 8
_MOST_TOKENS = 4096


class ChatBox:
    """The chat box on one viewer's page."""

    def __init__(self, source: ChatSource, servers: Callable[[], Sequence[str]]) -> None:
        self._source = source
        self._servers = servers
        self._task: asyncio.Task[None] | None = None
        self._pairs: Counter[str] = Counter()
        self._names: list[str] = []
        with ui.element("div").classes("chat-line"):
            self._input = TextField("Message", "Tell me about the sea.")
            self._input.props('data-part="message"').on("keydown.enter", self._send)
            self._tokens = ui.number("Max tokens", value=128, min=1, max=_MOST_TOKENS, precision=0)
            self._tokens.props("outlined dense").classes("short")
            self._button = Press("Send", lambda _: self._send())
            self._cancel = Press("Cancel", lambda _: self.end(), kind="plain")
        box = ui.element("div").classes("answer")
        box.props('role="log" aria-live="polite" aria-label="Answer" tabindex="0"')
        with box:
            self._answer = ui.element("div").props('data-part="answer"')
        self._legend = Drawn()
        self._legend.props('data-part="answer-servers"')
        self._show_buttons(answering=False)

    def end(self) -> None:
        """Cancel the answer in progress, if there is one: the viewer pressed Cancel, or the page is gone."""
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
        self._legend.show(encode())
        self._show_buttons(answering=True)
        self._task = asyncio.get_running_loop().create_task(self._stream(text, tokens))

    async def _stream(self, text: str, tokens: int) -> None:
        spans: list[Node] = []
        flusher = asyncio.get_running_loop().create_task(self._flush_often(spans))
        servers = Counter[str]()
        try:
            async with aclosing(self._source(text, tokens)) as pieces:
                async for piece in pieces:
                    if isinstance(piece, str):
                        spans.append(self._span(piece, servers))
                        servers.clear()
                    else:
                        # Tokens without text yet belong to the next text.
                        servers.update(piece)
        except ApiError as error:
            spans.append(h("span", f" The answer failed: {error}", class_="failed"))
        finally:
            flusher.cancel()
            self._flush(spans)
            self._task = None
            if not self._answer.is_deleted:
                self._show_buttons(answering=False)

    async def _flush_often(self, spans: list[Node]) -> None:
        while True:
            await asyncio.sleep(_FLUSH_S)
            self._flush(spans)

    def _flush(self, spans: list[Node]) -> None:
        """Append the new pieces of text to the answer in the browser."""
        if not spans or self._answer.is_deleted:
            return
        with self._answer:
            Drawn(encode(*spans), tag="span")
        spans.clear()
        if self._pairs:
            self._legend.show(encode(self._summary()))

    def _show_buttons(self, *, answering: bool) -> None:
        self._button.show("Send", enabled=not answering)
        self._cancel.show("Cancel", enabled=answering)

    def _span(self, text: str, servers: Counter[str]) -> Node:
        if not servers:
            return h("span", text)
        self._pairs.update(servers)
        ((most, _),) = servers.most_common(1)
        title = ", ".join(f"{s} {n / servers.total():.0%}" for s, n in sorted(servers.items()))
        return h(
            "span",
            text,
            class_=f"t t{self._colour(most)}",
            data_servers=" ".join(servers),
            title=f"computed by {title}",
        )

    def _colour(self, server: str) -> int:
        if server not in self._names:
            self._names.append(server)
        return self._names.index(server) % _COLOURS

    def _summary(self) -> Node:
        """Draw the share of each server in the answer, which is also the legend of the colours."""
        items = (
            h(
                "span",
                h("span", class_=f"key k{self._colour(name)}"),
                h("bdi", name),
                f" {pairs / self._pairs.total():.0%}",
            )
            for name, pairs in sorted(self._pairs.items())
        )
        return h("div", *items, class_="servers-of-answer")
