"""Checkpoints in the cache of huggingface_hub. It is only read: nothing is downloaded.

models--ORG--NAME/
  blobs/                  the files, by their hashes
  refs/main               the revision that was downloaded last
  snapshots/REVISION/     the directory of a checkpoint: links into blobs/
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from eaas.errors import CheckpointError, NotACheckpointError

__all__ = ["complete_download", "find_checkpoint", "model_name"]

_PREFIX = "models--"
_REPOSITORY = re.compile(r"\w[\w.-]*/\w[\w.-]*")


def find_checkpoint(text: str) -> Path:
    """Find a checkpoint's directory by its path, or by its ORG/NAME or models--ORG--NAME in the cache.

    As in transformers, an existing path comes first. Of a repository's snapshots, that of refs/main does.

    Returns:
        The directory, not checked further. A path that does not exist, unless it has the form of a name.

    Raises:
        NotACheckpointError: The cache has no such model, or several snapshots of it and no refs/main.
        CheckpointError: The cache cannot be read.
    """
    path = Path(text)
    if not os.path.exists(path):
        name = text.rstrip("/")
        if not (_REPOSITORY.fullmatch(name) or name.startswith(_PREFIX)):
            return path
        path = _in_cache(name)
    if not _is_repository(path):
        return path
    try:
        return _snapshot(path)
    except OSError as error:
        raise CheckpointError(
            f"{error.filename}: {error.strerror}: let this user read the cache (chmod -R a+rX)"
        ) from error


def model_name(directory: Path) -> str:
    """Name of a checkpoint: of a snapshot in a cache that of its repository, else the directory's."""
    directory = Path(os.path.abspath(directory))
    repository = directory.parent.parent
    if directory.parent.name == "snapshots" and _is_repository(repository):
        return _name(repository)
    return directory.name


def complete_download(place: str) -> str:
    """What a user does if files of a checkpoint are missing, for messages. `place`: `str` of its source."""
    if not os.path.isdir(place):
        return "complete the download"
    name = model_name(Path(place))
    if "/" in name:
        return f"complete the download (hf download {name})"
    return f"complete the download (hf download ORG/NAME --local-dir {place})"


def _in_cache(text: str) -> Path:
    """The folder of a repository in the cache."""
    try:
        # It reads HF_HUB_CACHE, HUGGINGFACE_HUB_CACHE, HF_HOME and XDG_CACHE_HOME.
        from huggingface_hub import constants
    except ModuleNotFoundError:
        # An installation of the control plane alone has no cache.
        return Path(text)
    cache = Path(constants.HF_HUB_CACHE).expanduser()
    folder = cache / (_PREFIX + text.removeprefix(_PREFIX).replace("/", "--"))
    if not os.path.isdir(folder):
        name = _name(folder)
        raise NotACheckpointError(
            f"{text} does not exist here, nor in the cache of huggingface_hub ({cache}): "
            f"give the local directory of a Hugging Face checkpoint, or `hf download {name}` first"
        )
    return folder


def _is_repository(path: Path) -> bool:
    """Whether a directory is a repository in a cache, perhaps mounted under another name."""
    if os.path.isfile(path / "config.json"):
        return False
    return path.name.startswith(_PREFIX) or all(
        os.path.isdir(path / name) for name in ("blobs", "snapshots")
    )


def _snapshot(repository: Path) -> Path:
    folder = repository / "snapshots"
    revisions = sorted(os.listdir(folder)) if folder.is_dir() else []
    main = repository / "refs" / "main"
    if main.is_file() and (revision := main.read_text().strip()) in revisions:
        return folder / revision
    if len(revisions) == 1:
        return folder / revisions[0]
    if not revisions:
        name = _name(repository)
        raise NotACheckpointError(f"{repository} has no snapshot: `hf download {name}` first")
    raise NotACheckpointError(
        f"{repository} has several snapshots and no refs/main that names one: give the path of one: "
        f"{', '.join(str(folder / revision) for revision in revisions)}"
    )


def _name(repository: Path) -> str:
    # The Hub allows no -- in names.
    folder = repository.name
    return folder.removeprefix(_PREFIX).replace("--", "/") if folder.startswith(_PREFIX) else folder
