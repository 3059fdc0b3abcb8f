"""Silences transformers' terminal output while a model loads."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

__all__ = ["quiet_transformers"]

_LOCK = threading.Lock()
# Level and progress bars belong to the process: the first block saves them, the last one restores them.
_blocks = 0
_saved = (0, False)


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Disable transformers' progress bars and lines below errors in a `with` block, then restore them.

    Blocks of several threads may overlap.
    """
    from transformers.utils import logging

    global _blocks, _saved
    with _LOCK:
        if not _blocks:
            _saved = logging.get_verbosity(), logging.is_progress_bar_enabled()
            logging.set_verbosity_error()
            logging.disable_progress_bar()
        _blocks += 1
    try:
        yield
    finally:
        with _LOCK:
            _blocks -= 1
            if not _blocks:
                verbosity, bars = _saved
                logging.set_verbosity(verbosity)
                if bars:
                    logging.enable_progress_bar()
