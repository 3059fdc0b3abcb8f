"""Hypothesis strategies for arbitrary protobuf messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

__all__ = ["messages"]

_T = FieldDescriptor
_NUMBERS: dict[int, tuple[int, int]] = {
    _T.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    _T.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    _T.CPPTYPE_UINT32: (0, 2**32 - 1),
    _T.CPPTYPE_UINT64: (0, 2**64 - 1),
}
Known = Mapping[str, st.SearchStrategy[Any]]


def messages(descriptor: Descriptor, known: Known, depth: int = 3) -> st.SearchStrategy[Any]:
    """Messages of a type.

    Args:
        descriptor: The type.
        known: Meaningful values by field name; a field has mostly these, sometimes any value.
        depth: Maximum depth of nested messages.
    """
    cls = GetMessageClass(descriptor)

    @st.composite
    def make(draw: st.DrawFn) -> Any:
        message = cls()
        for field in descriptor.fields:
            if draw(st.integers(0, 2)):
                _fill(draw, message, field, known, depth)
        return message

    return make()


def _fill(draw: st.DrawFn, message: Any, field: Any, known: Known, depth: int) -> None:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key, value = field.message_type.fields
        target = getattr(message, field.name)
        for _ in range(draw(st.integers(0, 2))):
            name = draw(known.get(f"{field.name}.key", _scalar(key)))
            target[name] = draw(_scalar(value))
    elif field.message_type is not None:
        if not depth:
            return
        inner = messages(field.message_type, known, depth - 1)
        if field.is_repeated:
            getattr(message, field.name).extend(draw(st.lists(inner, max_size=3)))
        else:
            getattr(message, field.name).CopyFrom(draw(inner))
    else:
        values = _scalar(field)
        if field.name in known:
            values = st.integers(0, 5).flatmap(
                lambda n, it=known[field.name], any_=values: it if n else any_
            )
        if field.is_repeated:
            getattr(message, field.name).extend(draw(st.lists(values, max_size=4)))
        else:
            setattr(message, field.name, draw(values))


def _scalar(field: Any) -> st.SearchStrategy[Any]:
    kind = field.cpp_type
    if kind in _NUMBERS:
        least, most = _NUMBERS[kind]
        return st.integers(0, 8) | st.integers(least, most) | st.sampled_from((least, most))
    if kind == _T.CPPTYPE_BOOL:
        return st.booleans()
    if kind in (_T.CPPTYPE_FLOAT, _T.CPPTYPE_DOUBLE):
        return st.floats(width=32) | st.sampled_from((0.0, 1.0, 0.5))
    if kind == _T.CPPTYPE_ENUM:
        return st.integers(0, len(field.enum_type.values)) | st.just(2**31 - 1)
    if field.type == _T.TYPE_BYTES:
        return st.binary(max_size=64)
    return st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
