"""A checkpoint behind a URL: only the wanted ranges are read; a store that fails gives one typed error."""

import json
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given
from hypothesis import strategies as st

from eaas.checkpoint import Checkpoint
from eaas.checkpoint.files import read_files
from eaas.checkpoint.header import ShardHeader
from eaas.checkpoint.source import is_local, is_url, local_directory, shown
from eaas.errors import (
    CheckpointError,
    CorruptShardError,
    EaasError,
    MissingShardError,
    NotACheckpointError,
)
from expert_server.weights import reader as reader_module
from expert_server.weights import url_source
from expert_server.weights.reader import ExpertReader
from expert_server.weights.remote_shard import RemoteShard
from expert_server.weights.url_source import UrlSource
from quantized_checkpoint import SCHEMES, quantized_copy
from range_server import RangeServer

SINGLE = "model.safetensors"
Paths = Callable[..., Path]
Sources = Callable[..., UrlSource]


@pytest.fixture(scope="session")
def single(checkpoint: Paths) -> Paths:
    """Make a small checkpoint of an architecture in a single file."""
    return partial(checkpoint, shard_size="1GB")


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(url_source.Backoff, "next_s", lambda _self: 0.001)


class Store:
    """A directory of fsspec's memory file system; counts the bytes that are read from it."""

    def __init__(self, directory: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory, self.url = directory, f"memory://{name}"
        self.read: list[tuple[str, int, int]] = []
        self.fs = fsspec.filesystem("memory")
        for file in directory.iterdir():
            self.put(file.name, file.read_bytes())
        cat_file = MemoryFileSystem.cat_file

        def counted(fs: Any, path: str, start: int, end: int, **options: Any) -> bytes:
            # What fsspec's file systems without asyncio pass on to their open files.
            assert options == {"cache_type": "none"}
            data = cat_file(fs, path, start, end)
            self.read.append((path.rpartition("/")[2], start, end))
            return data

        monkeypatch.setattr(MemoryFileSystem, "cat_file", counted)

    def put(self, name: str, data: bytes) -> None:
        self.fs.pipe_file(f"{self.url}/{name}", data)

    @property
    def bytes(self) -> int:
        return sum(end - begin for _, begin, end in self.read)


Stores = Callable[[Path], Store]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stores]:
    made: list[Store] = []

    def make(directory: Path) -> Store:
        made.append(Store(directory, f"eaas-test-{len(made)}", monkeypatch))
        return made[-1]

    yield make
    for each in made:
        each.fs.rm(each.url, recursive=True)


@pytest.fixture
def box(store: Stores, single: Paths) -> Store:
    """A store with a small checkpoint."""
    return store(single())


@pytest.fixture
def source() -> Iterator[Sources]:
    made: list[UrlSource] = []

    def make(url: str, deadline_s: float = 20.0) -> UrlSource:
        made.append(UrlSource(url, deadline_s))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def server(single: Paths, tmp_path: Path) -> Iterator[RangeServer]:
    with RangeServer(Path(shutil.copytree(single(), tmp_path / "served"))) as server:
        yield server


def assert_same_experts(
    there: ExpertReader, here: ExpertReader, layer: int, wanted: list[int]
) -> None:
    pairs = zip(there.read(layer, wanted), here.read(layer, wanted), strict=True)
    for (_, got), (_, own) in pairs:
        assert got.digest == own.digest
        for part in ("up", "down"):
            ours, theirs = getattr(own, part), getattr(got, part)
            if isinstance(ours, torch.Tensor):
                assert torch.equal(ours, theirs)
            else:
                assert torch.equal(ours.codes, theirs.codes)
                assert torch.equal(ours.scales, theirs.scales)


# -- what is read -----------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_only_headers_and_wanted_experts_are_read(arch, single, store, source) -> None:
    """Also where one tensor holds all experts."""
    path = single(arch)
    here, box = Checkpoint.open(path), store(path)
    there = Checkpoint.open(source(box.url))
    assert there.shape == here.shape
    assert there.shape.digest
    texts = (path / "config.json").stat().st_size
    headers = sum(header.nbytes for header in read_files(path).headers.values())
    samples = sum(min(here.nbytes(key), 4096) for key in here.other_keys())
    assert box.bytes == texts + headers + samples
    opened = box.bytes
    theirs, ours = ExpertReader(there), ExpertReader(here)
    wanted = [1, 2, 5]
    for layer in range(here.shape.num_layers):
        assert_same_experts(theirs, ours, layer, wanted)
    experts = sum(3 * ours.expert_bytes(layer) for layer in range(here.shape.num_layers))
    assert box.bytes - opened == experts
    assert experts < 0.5 * (path / SINGLE).stat().st_size
    # No byte twice.
    data = sorted((begin, end) for name, begin, end in box.read if name == SINGLE)
    assert all(first[1] <= second[0] for first, second in pairwise(data))


@pytest.mark.parametrize("name", ["fp8", "mxfp4", "gptq-desc_act", "modelopt-fp8"])
def test_quantised_experts_are_read_as_they_are_stored(
    name: str, single: Paths, store: Stores, source: Sources, tmp_path: Path
) -> None:
    arch = "gpt_oss" if name == "mxfp4" else "qwen3_moe"
    quantized_copy(single(arch), tmp_path / "m", SCHEMES[name])
    box = store(tmp_path / "m")
    theirs = ExpertReader(Checkpoint.open(source(box.url)))
    ours = ExpertReader(Checkpoint.open(tmp_path / "m"))
    opened = box.bytes
    assert theirs.stored == ours.stored
    assert_same_experts(theirs, ours, 1, [2, 6])
    assert box.bytes - opened == 2 * ours.expert_bytes(1)


def test_a_checkpoint_in_shards(checkpoint: Paths, store: Stores, source: Sources) -> None:
    path = checkpoint("mixtral", shard_size="40KB")
    box = store(path)
    here, there = Checkpoint.open(path), Checkpoint.open(source(box.url))
    assert there.shape == here.shape
    assert len(set(here.keys.values())) > 4
    box.read.clear()
    assert_same_experts(ExpertReader(there), ExpertReader(here), 1, [3])
    assert box.bytes == ExpertReader(here).expert_bytes(1)


def test_the_first_load_reads_ahead_in_several_threads(box, source, monkeypatch) -> None:
    """Two reads must be on the way at once, else this would wait for ever."""
    reader = ExpertReader(Checkpoint.open(source(box.url)))
    monkeypatch.setattr(reader_module, "_CHUNK_BYTES", reader.expert_bytes(0))
    both = threading.Barrier(2, timeout=20)
    counted = MemoryFileSystem.cat_file

    def together(fs: Any, path: str, start: int, end: int, **options: Any) -> bytes:
        both.wait()
        return counted(fs, path, start, end, **options)

    monkeypatch.setattr(MemoryFileSystem, "cat_file", together)
    with ThreadPoolExecutor(1) as ahead:
        found = [expert for expert, _ in reader.read(0, [0, 4], ahead=ahead)]
    assert found == [0, 4]


class Ranges:
    """Records the ranges of a shard that are read, of which each byte is its position modulo 251."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def read(self, name: str, offset: int, buffer: memoryview) -> None:
        self.asked.append((offset, len(buffer)))
        buffer[:] = bytes(at % 251 for at in range(offset, offset + len(buffer)))

    def start(self, work: Callable[..., None], *arguments: Any) -> Any:
        done: Future[None] = Future()
        done.set_result(work(*arguments))
        return done


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 30)), max_size=20),
    st.integers(1, 25),
    st.randoms(use_true_random=False),
)
def test_ranges_are_read_once_and_bounded(steps, most, dice) -> None:
    """Steps: the gap before a place, and its size. Places are requested in two parts, read in any order."""
    places, end = [], 0
    for gap, count in steps:
        places.append((end + gap, count))
        end += gap + count
    ranges = Ranges()
    shard = RemoteShard("s", "s", ShardHeader({}, 0, end, b""), ranges, most)
    shard.prefetch(places[: len(places) // 2])
    shard.prefetch(places)
    dice.shuffle(places)
    for offset, count in places:
        buffer, seen = bytearray(count), bytearray()
        shard.read_into(memoryview(buffer), offset, look=seen.extend)
        assert buffer == seen == bytes(at % 251 for at in range(offset, offset + count))
    assert all(0 < count <= most for _, count in ranges.asked)
    assert sum(count for _, count in ranges.asked) == sum(count for _, count in places)


# -- stores that fail -------------------------------------------------------------------------------


def raised(work: Callable[[], object], kind: type[EaasError]) -> str:
    with pytest.raises(kind) as error:
        work()
    assert type(error.value) is not EaasError
    return str(error.value)


def test_not_there(store: Stores, source: Sources, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe"}')
    box = store(tmp_path)
    text = raised(lambda: Checkpoint.open(source(box.url)), NotACheckpointError)
    assert text.startswith(
        f"{box.url} has no model.safetensors and no model.safetensors.index.json"
    )
    text = raised(lambda: Checkpoint.open(source("memory://nothing")), NotACheckpointError)
    assert text.startswith("memory://nothing has no config.json")
    index = {"weight_map": {"a": "model-1.safetensors"}}
    box.put("model.safetensors.index.json", json.dumps(index).encode())
    text = raised(lambda: Checkpoint.open(source(box.url)), MissingShardError)
    assert text == f"{box.url}/model-1.safetensors is missing: complete the download"


@pytest.mark.parametrize(
    ("begin", "cut", "said"),
    [
        (b"", 5, ""),
        (b"", 100, ""),
        (b"", -1, ""),
        ((1 << 40).to_bytes(8, "little"), None, "header of 1099511627776 bytes in a file of"),
    ],
)
def test_a_truncated_object_or_a_lying_header_is_refused(begin, cut, said, box, source) -> None:
    """The checks of local files; no more is read for them."""
    box.put(SINGLE, begin + (box.directory / SINGLE).read_bytes()[len(begin) : cut])
    text = raised(lambda: Checkpoint.open(source(box.url)), CorruptShardError)
    assert f"{box.url}/{SINGLE}" in text
    assert said in text
    assert box.bytes < 20_000


def test_an_object_that_changes_after_its_header(box: Store, source: Sources) -> None:
    """Also with the same size: experts of two versions must not mix."""
    reader = ExpertReader(Checkpoint.open(source(box.url)))
    assert len(list(reader.read(0, [0]))) == 1
    box.put(SINGLE, (box.directory / SINGLE).read_bytes())
    text = raised(lambda: list(reader.read(0, [1])), CorruptShardError)
    assert text.startswith(f"{box.url}/{SINGLE} has changed since its header was read")
    box.fs.rm(f"{box.url}/{SINGLE}")
    reader.release()
    text = raised(lambda: list(reader.read(0, [1])), MissingShardError)
    assert text.startswith(f"{box.url}/{SINGLE} is missing")


def test_a_stalled_read_ends_at_its_deadline(box, source, monkeypatch) -> None:
    """A file system that blocks, without asyncio."""
    reader = ExpertReader(Checkpoint.open(source(box.url, 0.2)))
    stalled, calls = threading.Event(), []

    def stall(*_: Any, **__: Any) -> bytes:
        calls.append(0)
        stalled.wait(60)
        return b""

    monkeypatch.setattr(MemoryFileSystem, "cat_file", stall)
    try:
        text = raised(lambda: list(reader.read(0, [0])), CheckpointError)
    finally:
        stalled.set()
    assert "also at the last of 5 attempts (no answer within 0.2 s): check the store" in text
    assert len(calls) >= 5


def test_http_ranges(server: RangeServer, source: Sources) -> None:
    here = Checkpoint.open(server.directory)
    there = Checkpoint.open(source(server.url))
    assert there.shape == here.shape
    ours = ExpertReader(here)
    opened = server.sent.total()
    assert_same_experts(ExpertReader(there), ours, 0, [3, 4])
    assert server.sent.total() - opened == 2 * ours.expert_bytes(0)
    assert server.headers["Accept-Encoding"] == "identity"


def test_another_hosts_files_come_through_the_proxy(monkeypatch, server, source) -> None:
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.setenv("http_proxy", server.url.removesuffix("/models/m"))
    # A documentation address (RFC 5737): nobody answers there.
    there = Checkpoint.open(source("http://192.0.2.1/models/m"))
    assert there.shape == Checkpoint.open(server.directory).shape
    assert all(target.startswith("http://192.0.2.1/models/m/") for target in server.targets)


def test_http_stalls_and_failures_are_tried_again(server: RangeServer, source: Sources) -> None:
    """The first attempt at each request fails, in ways that take turns."""
    faults = cycle([503, 60.0, "cut", 429, 500])
    server.fault = lambda _method, _name, attempt: next(faults) if attempt == 1 else None
    there = ExpertReader(Checkpoint.open(source(server.url, 1.5)))
    assert_same_experts(there, ExpertReader(Checkpoint.open(server.directory)), 1, [0, 7])


@pytest.mark.parametrize(
    ("fault", "kind", "match"),
    [
        (503, CheckpointError, "attempts (status 503): check the store and the network"),
        (60.0, CheckpointError, "attempts (no answer within 0.5 s): check the store"),
        ("cut", CheckpointError, "cannot be read, also at the last of 5 attempts"),
        ("whole", CheckpointError, "its server does not answer range requests: use one that does"),
        (404, MissingShardError, "is missing: restore it"),
        (
            403,
            CheckpointError,
            "(status 403): check the URL, and give credentials by the environment",
        ),
        (400, CheckpointError, "cannot be read (status 400): check the URL"),
    ],
)
def test_http_faults(fault, kind, match, server, source) -> None:
    reader = ExpertReader(Checkpoint.open(source(server.url, 0.5 if fault == 60.0 else 20)))
    server.fault = lambda method, *_: fault if method == "GET" else None
    sent = server.sent.total()
    text = raised(lambda: list(reader.read(1, [2])), kind)
    assert text.startswith(f"{server.url}/{SINGLE}")
    assert match in text
    # A server that ignores ranges is not read to the end, but sockets have buffers.
    assert fault == "whole" or server.sent.total() - sent < 10 * reader.expert_bytes(1)
    server.fault = lambda *_: None
    assert_same_experts(reader, ExpertReader(Checkpoint.open(server.directory)), 1, [2])


def test_http_object_that_changes(server: RangeServer, source: Sources) -> None:
    reader = ExpertReader(Checkpoint.open(source(server.url)))
    file = server.directory / SINGLE
    file.write_bytes(file.read_bytes()[:-1])
    text = raised(lambda: list(reader.read(0, [1])), CorruptShardError)
    assert "has changed since its header was read: start this server again" in text


def test_refused_files_count_as_missing_once_one_was_read(server, source) -> None:
    """S3 answers 403 for a file that does not exist, if the user may not list files."""
    server.fault = lambda _method, name, _: None if name == "config.json" else 403
    raised(lambda: Checkpoint.open(source(server.url)), NotACheckpointError)
    server.fault = lambda *_: 403
    assert "give credentials" in raised(
        lambda: Checkpoint.open(source(server.url)), CheckpointError
    )


# -- URLs and credentials ---------------------------------------------------------------------------


def test_credentials_reach_the_server_and_no_message(server, source, caplog, capfd) -> None:
    caplog.set_level("DEBUG", "expert_server")
    url = server.url.replace("http://", "http://someone:pass%20word@") + "?sig=sEcReT"
    reader = ExpertReader(Checkpoint.open(source(url)))
    assert server.targets[-1].endswith(f"/models/m/{SINGLE}?sig=sEcReT")
    assert server.headers["Authorization"].startswith("Basic ")
    server.fault = lambda method, *_: 500 if method == "GET" else None
    texts = [raised(lambda: list(reader.read(1, [2])), CheckpointError)]
    assert texts[0].startswith(f"{server.url}/{SINGLE} ")
    server.fault = lambda *_: 403
    texts.append(raised(lambda: Checkpoint.open(source(url)), CheckpointError))
    server.fault = lambda *_: 404
    texts.append(raised(lambda: Checkpoint.open(source(url)), CheckpointError))
    texts += [caplog.text, *capfd.readouterr()]
    for secret in ("someone", "pass", "sEcReT", "sig="):
        assert secret not in "\n".join(texts)


def test_credentials_of_an_url_that_cannot_be_opened(source: Sources) -> None:
    for url in (
        "nothing://me:secret@host/x?token=t",
        "https://[me:secret@host/x",
        "http://me:secret@127.0.0.1:1/m?token=t",
    ):
        with pytest.raises(EaasError) as error:
            Checkpoint.open(source(url, 1.0))
        assert "secret" not in str(error.value)
        assert "token" not in str(error.value)


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
