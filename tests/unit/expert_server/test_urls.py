"""URLs of checkpoints: how they are told from paths and shown; packages and schemes that are missing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eaas.checkpoint.source import is_local, is_url, local_directory, shown
from eaas.errors import NotACheckpointError
from expert_server.weights.url_source import UrlSource


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("s3://bucket/a/b/", "s3://bucket/a/b"),
        ("https://me:pw@host:80/a?token=x#y", "https://host:80/a"),
        ("https://me:p@w@host/a@b", "https://host/a@b"),
        ("https://host?sig=a/b@c", "https://host"),
        ("http://[::1]:80/m", "http://[::1]:80/m"),
    ],
)
def test_urls_are_shown_without_credentials(url: str, text: str) -> None:
    assert shown(url) == text


@given(
    st.text("abc:@/?#%", min_size=1),
    st.text("xyz:%", min_size=1),
    st.text("tuv=&/@:", min_size=1),
)
def test_no_password_or_query_is_shown(user: str, password: str, query: str) -> None:
    user = user.translate(dict.fromkeys(map(ord, "/?#"), "-"))
    found = shown(f"s3://{user}:{password}@bucket/path?{query}")
    assert found == "s3://bucket/path"


def test_urls_and_paths() -> None:
    assert is_url("s3://b/p")
    assert not is_url("/models/s3:/b")
    assert local_directory("/models/m") == Path("/models/m")
    assert local_directory("file:///models/a%20b") == Path("/models/a b")
    with pytest.raises(NotACheckpointError, match=r"^s3://b/p: the attention client reads a local"):
        local_directory("s3://u:p@b/p")
    assert is_local("/models/m")
    assert is_local("File:///models/m")
    assert not is_local("s3://b/p")


@pytest.mark.parametrize("url", ["https://huggingface.co/org/demo", "hf://org/demo"])
def test_a_url_of_the_hub_names_the_download(url: str) -> None:
    with pytest.raises(NotACheckpointError, match=r"`hf download org/demo`, and give org/demo$"):
        local_directory(url)


def test_a_package_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(NotACheckpointError) as error:
        UrlSource("s3://bucket/m")
    assert str(error.value) == "s3://bucket/m: s3:// needs s3fs: pip install s3fs"


def test_an_unknown_scheme() -> None:
    with pytest.raises(NotACheckpointError, match=r"nothing://b: fsspec cannot open nothing://"):
        UrlSource("nothing://b")
