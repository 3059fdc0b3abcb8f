"""Validation of protobuf messages against the ranges of their fields (`eaas.net.message_ranges`).

gRPC servers validate every request before its handler (`eaas.net.request_validation`); clients validate
answers whose numbers they use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from eaas.net.message_ranges import Items, Number, Range, Text, range_of

__all__ = ["check"]

_PACKAGE = "eaas.rpc.v1"
_Checker = Callable[[Any], None]
_checkers: dict[str, _Checker] = {}


class _OutOfRangeError(ValueError):
    """A value is out of range; carries the path of its field."""

    def __init__(self, where: str, what: str) -> None:
        super().__init__(f"{where} {what}")
        self.where, self.what = where, what


def check(message: Any) -> None:
    """Validate all numbers and texts of a received protobuf message, before they are used.

    Args:
        message: Any message; types without an entry in the table pass.

    Raises:
        ValueError: A value is out of range; the message names field, value and range.
    """
    try:
        _checker(message.DESCRIPTOR)(message)
    except _OutOfRangeError as error:
        raise ValueError(f"{message.DESCRIPTOR.name}.{error}") from None


def _checker(descriptor: Descriptor) -> _Checker:
    # Compiled once per type, because thousands of messages arrive per second.
    known = _checkers.get(descriptor.full_name)
    if known is None:
        known = _checkers[descriptor.full_name] = _compile(descriptor)
    return known


def _compile(descriptor: Descriptor) -> _Checker:
    ours = descriptor.file.package == _PACKAGE
    numbers: list[tuple[str, float, float]] = []
    others: list[Callable[[Any], None]] = []
    for field in descriptor.fields:
        wanted = range_of(descriptor.name, field.name) if ours else None
        plain = not field.is_repeated and not field.has_presence
        if plain and isinstance(wanted, Number):
            numbers.append((field.name, wanted.least, wanted.most))
        elif (made := _field_checker(field, wanted)) is not None:
            others.append(made)

    def checker(message: Any) -> None:
        for name, least, most in numbers:
            # Also False for NaN.
            if not least <= (value := getattr(message, name)) <= most:
                raise _refusal(name, value, least, most)
        for other in others:
            other(message)

    return checker


def _refusal(name: str, value: object, least: float, most: float) -> _OutOfRangeError:
    low, high = (f"{end:g}" if isinstance(end, float) else end for end in (least, most))
    return _OutOfRangeError(name, f"is {value}: it can be {low} to {high}")


def _field_checker(field: FieldDescriptor, wanted: Range | None) -> _Checker | None:
    name, inner = field.name, field.message_type
    if inner is not None and inner.GetOptions().map_entry:
        return _map_checker(name, wanted) if isinstance(wanted, Items) else None
    if inner is not None:
        most = wanted.most if isinstance(wanted, Items) else None
        return _messages_checker(field, _checker(inner), most)
    if field.enum_type is not None:
        return _enum_checker(name, frozenset(field.enum_type.values_by_number))
    if wanted is None or isinstance(wanted, Items):
        return None
    one, most_items = _value_checker(name, wanted), wanted.items

    def check_all(message: Any) -> None:
        found = getattr(message, name)
        _check_count(name, len(found), most_items)
        for value in found:
            one(value)

    def check_single(message: Any) -> None:
        if not field.has_presence or message.HasField(name):
            one(getattr(message, name))

    return check_all if field.is_repeated else check_single


def _value_checker(name: str, wanted: Number | Text) -> Callable[[Any], None]:
    if isinstance(wanted, Number):
        least, most = wanted.least, wanted.most

        def check_number(value: float) -> None:
            if not least <= value <= most:
                raise _refusal(name, value, least, most)

        return check_number

    longest, form, rule = wanted.longest, wanted.form, wanted.rule

    def check_text(value: str) -> None:
        if len(value) > longest:
            raise _OutOfRangeError(
                name, f"has {len(value)} characters: it can have {longest} at most"
            )
        if form is not None and not form.fullmatch(value):
            raise _OutOfRangeError(name, f"is {value!r}: it can be {rule}")

    return check_text


def _check_count(name: str, count: int, most: int) -> None:
    if count > most:
        raise _OutOfRangeError(name, f"has {count} entries: it can have {most} at most")


def _enum_checker(name: str, known: frozenset[int]) -> _Checker:
    def checker(message: Any) -> None:
        if (value := getattr(message, name)) not in known:
            raise _OutOfRangeError(name, f"is {value}: it can be one of {sorted(known)}")

    return checker


def _map_checker(name: str, wanted: Items) -> _Checker:
    assert wanted.key is not None
    assert wanted.value is not None
    key = _value_checker(f"{name} key", wanted.key)
    value = _value_checker(f"{name} value", wanted.value)

    def checker(message: Any) -> None:
        entries = getattr(message, name)
        _check_count(name, len(entries), wanted.most)
        for entry in entries:
            key(entry)
            value(entries[entry])

    return checker


def _messages_checker(field: FieldDescriptor, one: _Checker, most: int | None) -> _Checker:
    name = field.name

    def check_one(message: Any, where: str) -> None:
        try:
            one(message)
        except _OutOfRangeError as error:
            raise _OutOfRangeError(f"{where}.{error.where}", error.what) from None

    if not field.is_repeated:

        def check_single(message: Any) -> None:
            if message.HasField(name):
                check_one(getattr(message, name), name)

        return check_single

    def check_all(message: Any) -> None:
        found = getattr(message, name)
        if most is not None:
            _check_count(name, len(found), most)
        for i, entry in enumerate(found):
            check_one(entry, f"{name}[{i}]")

    return check_all
