"""Small text files of a checkpoint that cannot be read: one line says why."""

from pathlib import Path

import pytest

from eaas.checkpoint.local import LocalSource
from eaas.checkpoint.text_files import LFS_POINTER, check_kinds, read_object
from eaas.errors import CheckpointError

GOOD = '{"ä": 1}'


@pytest.mark.parametrize(
    ("text", "read"), [(GOOD, {"ä": 1}), (r'{"\ud83d\ude00": "\\ud83d"}', {"😀": r"\ud83d"})]
)
def test_a_good_file(tmp_path: Path, text: str, read: dict[str, object]) -> None:
    (tmp_path / "x.json").write_text(text, encoding="utf-8")
    assert read_object(LocalSource(tmp_path), "x.json") == read
    assert read_object(LocalSource(tmp_path), "y.json") is None


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is empty: download it again"),
        (b"null", "holds null instead of an object"),
        (b"[1]", "holds a list instead of an object"),
        (b'"x"', "holds text instead of an object"),
        (b'{"a": 1,\n "b": ', "line 2 column 7"),
        (b'{"a": 1,\n "b": "c', "line 2 column 7"),
        (b"<!DOCTYPE html>\n<p>", "line 1 column 1: it begins with '<!DOCTYPE html>"),
        (b"[" * 100_000, "is not JSON"),
        (rb'{"a": ["x\ud83d"]}', r"has '\ud83d', half of a character"),
        (LFS_POINTER + b".github.com/spec/v1\noid sha256:1\nsize 3\n", "run `git lfs pull`"),
        (GOOD.encode("utf-8-sig"), "the byte order mark of UTF-8: save it as UTF-8 without"),
        (GOOD.encode("utf-16"), "the byte order mark of UTF-16: save it as UTF-8"),
        (GOOD.encode("utf-16-le"), "UTF-16: save it as UTF-8"),
        (GOOD.encode("utf-16-be"), "UTF-16: save it as UTF-8"),
        (GOOD.encode("latin-1"), "is not UTF-8 (byte 2)"),
        ('{"ä'.encode()[:-1], "ends inside a character: download it again"),
    ],
)
def test_a_broken_file(tmp_path: Path, data: bytes, words: str) -> None:
    (tmp_path / "x.json").write_bytes(data)
    with pytest.raises(CheckpointError) as caught:
        read_object(LocalSource(tmp_path), "x.json")
    assert str(caught.value).startswith(f"{tmp_path}/x.json")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_kinds() -> None:
    check_kinds("x", {"a": 1, "b": True, "c": None}, {"a": (float,), "b": (bool,), "d": (str,)})
    with pytest.raises(CheckpointError, match=r'^x: a is "hot", not a number or null: repair'):
        check_kinds("x", {"a": "hot"}, {"a": (float, type(None))})
    for value, shown in ((float("nan"), "NaN"), (float("-inf"), "-Infinity")):
        with pytest.raises(CheckpointError, match=rf"^x: a is {shown}, not a number: repair"):
            check_kinds("x", {"a": value}, {"a": (float,)})
    with pytest.raises(CheckpointError, match=r"^x: a is true, not a whole number: repair"):
        check_kinds("x", {"a": True}, {"a": (int,)})
