"""Log lines of this project's packages in vLLM's log."""

from __future__ import annotations

import logging

__all__ = ["log_with_vllm"]


def log_with_vllm() -> None:
    """Give our packages' loggers the handlers and the level of vLLM's logger, in one of its processes."""
    theirs = logging.getLogger("vllm")
    for package in ("attention_client", "eaas"):
        ours = logging.getLogger(package)
        ours.handlers[:] = theirs.handlers
        ours.setLevel(theirs.level)
        # As vLLM's own: the root logger of the program may have another format.
        ours.propagate = not theirs.handlers
