"""Finds the section of a checkpoint's JSON that tells how the weights are stored.

Most makers write it into config.json. ModelOpt's exports, AutoGPTQ and AutoAWQ have it in a file of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from eaas.checkpoint.source import CONFIG
from eaas.errors import UnsupportedModelError

__all__ = ["SIDE_FILES", "Section", "side_section", "stated_section"]

# File -> quant_method, where the file does not name it.
SIDE_FILES = {
    "hf_quant_config.json": "modelopt",
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
}


@dataclass(frozen=True)
class Section:
    """What a checkpoint tells of its format.

    Attributes:
        file: Name of the file.
        method: `quant_method`, in lower case.
        fields: All fields.
    """

    file: str
    method: object
    fields: Mapping[str, Any]


def stated_section(place: Callable[[str], str], config: Mapping[str, Any]) -> Section | None:
    """Return the section of config.json; None: there is none, or it is empty.

    Raises:
        UnsupportedModelError: It is not a mapping.
    """
    parts = [part for part in (config, config.get("text_config")) if isinstance(part, Mapping)]
    # The last one: older releases of compressed-tensors.
    places = [*((part, "quantization_config") for part in parts), (config, "compression_config")]
    for part, name in places:
        fields = part.get(name)
        if not fields:
            continue
        if not isinstance(fields, Mapping):
            shown = " ".join(str(fields).split())[:40]
            raise UnsupportedModelError(
                f"{place(CONFIG)}: {name} is {shown!r} where a mapping of settings belongs: "
                "copy it from the published model"
            )
        return _section(CONFIG, fields, None)
    return None


def side_section(read: Callable[[str], dict[str, Any]]) -> Section | None:
    """Return the section of the first of SIDE_FILES that has one.

    Args:
        read: Reads a file with a JSON object; empty: there is none of that name.

    Raises:
        CheckpointError: The file cannot be read.
    """
    for file, method in SIDE_FILES.items():
        fields = read(file)
        if fields:
            return _section(file, fields, method)
    return None


def _section(file: str, fields: Mapping[str, Any], method: str | None) -> Section:
    # ModelOpt has a section in its section, and names itself as the producer only.
    inner = fields.get("quantization")
    producer = fields.get("producer")
    if isinstance(producer, Mapping) and producer.get("name") == "modelopt":
        method = "modelopt"
    merged = {**fields, **(inner if isinstance(inner, Mapping) else {})}
    method = merged.setdefault("quant_method", method)
    # Some tools write it in upper case.
    return Section(file, method.lower() if isinstance(method, str) else method, merged)
