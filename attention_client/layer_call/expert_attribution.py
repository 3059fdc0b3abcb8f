"""Expert attribution in a client: record which servers computed each token, for requests that ask."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from attention_client.layer_call.decisions import Attempt
from attention_client.layer_call.turns import micro_batch_tokens

__all__ = ["ExpertAttribution", "SeenServers"]


class SeenServers:
    """Record of the (token, expert) pairs that each server computed in one forward pass, over all layers."""

    def __init__(self) -> None:
        # (server, tokens in ascending order, pairs of each)
        self._parts: list[tuple[str, npt.NDArray[np.int64], npt.NDArray[np.int64]]] = []

    def saw(self, answered: Sequence[Attempt]) -> None:
        """Add the answers of a finished layer call: which server computed how many pairs of which token."""
        part = micro_batch_tokens()
        first = part.start if part is not None else 0
        for attempt in answered:
            rows_R = attempt.part.rows_R + first
            pairs_R = np.count_nonzero(attempt.part.pairs_RK, axis=1)
            self._parts.append((attempt.connection.server_id, rows_R, pairs_R))

    def of(self, token: int) -> Mapping[str, int]:
        """Return, for a request's answer, how many pairs of one token each server computed, by server id."""
        found: dict[str, int] = {}
        for server, tokens_R, pairs_R in self._parts:
            at = int(np.searchsorted(tokens_R, token))
            if at < tokens_R.size and tokens_R[at] == token:
                found[server] = found.get(server, 0) + int(pairs_R[at])
        return found

    def take_last(self) -> Mapping[str, int]:
        """Return the pairs of a one-sequence batch's last token by server id, and clear the record."""
        last = max((int(tokens_R[-1]) for _, tokens_R, _ in self._parts), default=0)
        found = self.of(last)
        self._parts.clear()
        return found


class ExpertAttribution:
    """Switch of the recording for one client's layer calls. Used by the thread that runs the model."""

    def __init__(self) -> None:
        self._seen: SeenServers | None = None

    @contextlib.contextmanager
    def watching(self, asked: bool) -> Iterator[SeenServers | None]:
        """Record the layer calls made inside the block if `asked` (by a request); otherwise yield None."""
        self._seen = SeenServers() if asked else None
        try:
            yield self._seen
        finally:
            self._seen = None

    @property
    def is_watching(self) -> bool:
        """Whether layer calls must be recorded."""
        return self._seen is not None

    def saw(self, answered: Sequence[Attempt]) -> None:
        """Record the answers of a layer call, which calls this at its end, if recording is on."""
        if self._seen is not None:
            self._seen.saw(answered)
