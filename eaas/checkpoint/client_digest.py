"""Digest of the files that a frontend and its engines must have in common."""

from __future__ import annotations

import hashlib
from pathlib import Path

from eaas.checkpoint.tokenizer_files import is_vocabulary

__all__ = ["client_digest"]

_CONFIGS = ("config.json", "tokenizer_config.json")


def client_digest(path: Path) -> str:
    """Return a digest of a checkpoint's config and tokenizer: token ids mean the same where it is equal."""
    digest = hashlib.sha256()
    for file in sorted(path.iterdir()):
        if file.name in _CONFIGS or is_vocabulary(file.name):
            content = file.read_bytes()
            digest.update(f"{file.name}\0{len(content)}\0".encode())
            digest.update(content)
    return digest.hexdigest()
