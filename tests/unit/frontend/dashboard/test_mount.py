"""The dashboard's route: readings for viewers alone, and who may act."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from eaas.cluster_snapshot import ClusterSnapshot
from eaas.cluster_snapshot.model import MemberSnapshot
from eaas.types import Member, MemberState, Role
from frontend.dashboard.mount import Dashboard
from frontend.dashboard.operator import Operator
from frontend.dashboard.viewers import OperatorToken, token_of
from waiting import eventually

HERE = "http://127.0.0.1:8000"
SNAPSHOT, ACTIONS = "/eaas/v1/snapshot", "/eaas/v1/actions"
TOKEN = token_of("secret")
PERIOD_S = 0.2
SERVER = Member("s", Role.EXPERT_SERVER, 7, "elsewhere", "h:1", MemberState.SERVING, incarnation=3)
KILL = {"action": "kill", "member": "s", "incarnation": 3}


class Reader:
    """Counts readings; may fail."""

    def __init__(self) -> None:
        self.looks = 0
        self.failing = self.closed = False

    def look(self) -> ClusterSnapshot:
        self.looks += 1
        if self.failing:
            raise RuntimeError("it broke")
        return ClusterSnapshot(at=float(self.looks), members=(MemberSnapshot(SERVER, 0.1),))

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def reader() -> Reader:
    return Reader()


@pytest.fixture
def serve(reader: Reader) -> Iterator[Callable[..., TestClient]]:
    """Serves a dashboard with a model named demo."""
    with ExitStack() as stack:

        def serve(
            operator: Operator | None = None, token: OperatorToken | None = None
        ) -> TestClient:
            made: Any = reader
            dashboard = Dashboard(lambda: made, operator, token, PERIOD_S)
            dashboard.serve("demo", has_chat=True, names_servers=False)
            app = Starlette()
            app.router.routes.append(dashboard)
            app.state.dashboard = dashboard
            return stack.enter_context(TestClient(app, base_url=HERE))

        yield serve


def test_viewers_share_a_reading_and_without_one_there_is_none(
    serve: Callable[..., TestClient], reader: Reader
) -> None:
    client = serve()
    assert client.get("/").status_code == 200
    time.sleep(2 * PERIOD_S)
    assert reader.looks == 0
    begun = time.monotonic()
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: client.get(SNAPSHOT), range(40)))
    periods = (time.monotonic() - begun) / (0.9 * PERIOD_S)
    assert {answer.status_code for answer in answers} == {200}
    assert 1 <= reader.looks <= 1 + periods
    looks = reader.looks
    time.sleep(2 * PERIOD_S)
    assert reader.looks == looks
    assert client.get(SNAPSHOT).json()["members"][0]["id"] == "s"
    assert reader.looks == looks + 1


def test_a_failed_reading_keeps_the_last_snapshot_and_is_tried_again(
    serve: Callable[..., TestClient], reader: Reader, caplog: pytest.LogCaptureFixture
) -> None:
    client = serve()
    assert client.get(SNAPSHOT).json()["alerts"] == []

    def alert() -> str:
        found = client.get(SNAPSHOT).json()
        assert found["members"][0]["id"] == "s"
        return str(found["alerts"][0]["lines"][0]) if found["alerts"] else ""

    reader.failing, before = True, reader.looks
    eventually(lambda: alert().startswith("The cluster cannot be") and reader.looks > before + 2)
    reader.failing = False
    eventually(lambda: alert() == "")
    told = [r.message for r in caplog.records if r.name.startswith("frontend")]
    assert told == ["the dashboard cannot read the cluster"], "once"


def test_close_ends_the_reader_and_its_polls(
    serve: Callable[..., TestClient], reader: Reader
) -> None:
    client = serve()
    client.get(SNAPSHOT)
    assert client.portal is not None
    client.portal.call(client.app.state.dashboard.close)  # type: ignore[attr-defined]
    assert reader.closed
    looks = reader.looks
    time.sleep(2 * PERIOD_S)
    assert client.get(SNAPSHOT).status_code == 200
    assert reader.looks == looks


def test_the_token_opens_the_buttons(serve: Callable[..., TestClient]) -> None:
    client = serve(Operator(), OperatorToken(TOKEN, 8000))
    assert client.get(SNAPSHOT).json()["is_operator"] is False
    refused = client.post(ACTIONS, json=KILL)
    assert (refused.status_code, refused.text) == (403, "Only the operator's page may do this.\n")
    assert client.get(f"/operator/{'0' * 64}/").status_code == 403
    client.get(f"/operator/{TOKEN}/")
    assert client.get(SNAPSHOT).json()["is_operator"] is True
    done = client.post(ACTIONS, json=KILL)
    assert done.json() == {"message": "s runs on elsewhere: end it there"}


def test_without_an_operator_nobody_acts(serve: Callable[..., TestClient]) -> None:
    client = serve()
    assert client.get(SNAPSHOT).json()["is_operator"] is None
    assert client.post(ACTIONS, json=KILL).status_code == 403


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),  # curl
        ({"sec-fetch-site": "same-origin"}, 200),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),  # another port of this machine
        ({"sec-fetch-site": "cross-site", "sec-fetch-dest": "document"}, 403),  # a form
        ({"origin": HERE}, 200),
        ({"origin": "http://127.0.0.1:8001"}, 403),
        ({"host": "evil.example:8000"}, 403),  # DNS rebinding
    ],
)
def test_only_the_page_itself_may_act(
    serve: Callable[..., TestClient], headers: dict[str, str], status: int
) -> None:
    assert serve(Operator()).post(ACTIONS, json=KILL, headers=headers).status_code == status


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"\xff",
        b"{}",
        b'{"action": "reboot"}',
        b'{"action": "kill"}',
        b'{"action": "scale", "servers": "3"}',
        b'{"action": ["kill"], "member": "s", "incarnation": 3}',
    ],
)
def test_no_action(serve: Callable[..., TestClient], body: bytes) -> None:
    client = serve(Operator())
    assert client.post(ACTIONS, content=body).status_code == 400
    assert client.get(ACTIONS).status_code == 405


@pytest.mark.parametrize("layer", ["", "0", "1", "-1", "x", "9" * 5000, "²"])
def test_any_layer_may_be_asked_for(serve: Callable[..., TestClient], layer: str) -> None:
    assert serve().get(SNAPSHOT, params={"layer": layer}).json()["placement"] is None


def test_files_of_the_page_and_no_others(serve: Callable[..., TestClient]) -> None:
    client = serve()
    page = client.get("/").text
    for name in ("page.css", "page.js", "vendor/uPlot.iife.min.js"):
        assert f"page/{name}" in page
        found = client.get(f"/page/{name}")
        assert found.headers["cache-control"] == "no-cache"
        again = client.get(f"/page/{name}", headers={"if-none-match": found.headers["etag"]})
        assert again.status_code == 304
    for name in ("", "mount.py", "../mount.py", "%2e%2e/mount.py", "/etc/passwd"):
        assert client.get(f"/page/{name}").status_code == 404
