"""Hostile names and texts of members run no script, do not break the page and are shown unchanged."""

from __future__ import annotations

import http.server
import json
import re
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from browser import Watched, open_page
from ui_fixture import UiFixture

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

RUN = "window.ran=1"
NAMES = {
    "a property with a script": f"zz :href=location=/javascript:{RUN}/.source \\",
    "a handler": f"y :onclick={RUN} :title={RUN} \\",
    "not a property": "y x=[1(] \\",
    "an image": f'<img src=x onerror="{RUN}">',
    "the end of an attribute": f"\"><script>{RUN}</script><a x='",
    "the end of a script": f"</script><script>{RUN}</script>",
    "a template": f"{{{{constructor.constructor('{RUN}')()}}}}",
    "the end of a string": f"`${{{RUN}}}` \\` \\u0060 ';{RUN};//",
    "entities": f"&lt;img src=x onerror={RUN}&gt; &#96; &#36;{{{RUN}}} &amp;",
    "quotes and backslashes": "'\"\\\\\"'\\",
    "lines": "one\ntwo\r\nthree\tfour\x00five\u2028six",
    "right to left": "\u202egnp.exe\u2066 \u200f‮",
    "255 characters": "x" * 255,
    "a long word": "é<" * 127,
}


PARTS = ("members", "alerts", "events", "decisions", "load", "placement")


def test_row_41_hostile_texts_are_shown_and_do_nothing(browser: Any, ui_fixture: UiFixture) -> None:
    texts = list(NAMES.values())
    ui_fixture.show(json.dumps(texts))
    with open_page(browser, ui_fixture.url, viewport={"width": 390, "height": 844}) as watched:
        page = watched.page
        page.on("dialog", lambda dialog: watched.complaints.append(dialog.message))
        # First as an update of the open page, then as part of the loaded page.
        for _ in range(2):
            page.wait_for_function(
                "text => document.querySelector('#members')?.textContent.includes(text)",
                arg=texts[-1],
            )
            _check_shown(watched, texts)
            _check_quiet(watched, ui_fixture.url)
            answer = page.reload()
            assert answer is not None
            assert answer.status == 200


def _check_shown(watched: Watched, texts: list[str]) -> None:
    shown = {part: watched.part(part).text_content() for part in PARTS}
    missing = [(p, t) for p in PARTS for t in texts if t not in shown[p] and p != "alerts"]
    assert missing == []
    assert "".join(texts) in shown["alerts"]
    labels = watched.page.locator("button").evaluate_all("all => all.map(b => b.ariaLabel ?? '')")
    wanted = {f"{v} {d}{t}" for v in ("Kill", "Pause") for d in ("", "dead ") for t in texts}
    assert wanted <= set(labels)


def _check_quiet(watched: Watched, url: str) -> None:
    page = watched.page
    # A button with such a name only asks for confirmation.
    kill = page.get_by_role("button", name=re.compile("^Kill ")).first
    kill.click()
    page.get_by_role("dialog").wait_for()
    page.keyboard.press("Escape")
    assert page.evaluate("window.ran") is None
    assert page.url == f"{url}/"
    assert page.title() == "Expert-as-a-Service"
    strange = 'img[src="x"], [onerror], [onclick], #app script, #app [href]:not([href="#message"])'
    assert page.locator(strange).count() == 0
    assert watched.part("operate-status").inner_text() == "", "no action ran"
    assert watched.hosts == {httpx.URL(url).netloc.decode()}
    assert watched.complaints == []
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_row_41_the_policy_alone_stops_what_would_come_in_as_markup(
    browser: Any, ui_fixture: UiFixture
) -> None:
    """The second line of defence: injected markup would not run."""
    ui_fixture.show("small")
    with open_page(browser, ui_fixture.url) as watched:
        watched.wait_text("members", "SERVING")
        thrown = watched.page.evaluate(
            """() => {
                window.refused = [];
                document.addEventListener("securitypolicyviolation", e => refused.push(e.effectiveDirective));
                const {body} = document, make = tag => document.createElement(tag);
                const attempts = [
                    () => body.insertAdjacentHTML("beforeend", '<img src=x onerror="window.ran=1">'),
                    () => { body.innerHTML = '<svg onload="window.ran=1">' },
                    () => body.setAttribute("onclick", "window.ran=1"),
                    () => body.append(Object.assign(make("script"), {text: "window.ran=1"})),
                    () => { make("iframe").srcdoc = "<script>parent.ran=1</script>" },
                ];
                const thrown = attempts.map(attempt => {
                    try { attempt() } catch (error) { return error.name }
                });
                const script = make("script");
                script.append("window.ran=1");
                body.append(script);
                const link = Object.assign(make("a"), {href: "javascript:window.ran=1"});
                body.append(link);
                link.click();
                // Later: the policy does not apply to code that the debugger evaluates.
                setTimeout(() => new Function("window.ran=1")());
                return thrown;
            }"""
        )
        assert thrown == ["TypeError"] * 5
        watched.page.wait_for_function("refused.length >= 8")
        assert watched.page.evaluate("window.ran") is None


def test_each_response_has_the_policy(ui_fixture: UiFixture) -> None:
    for path, status in (
        ("/", 200),
        ("/page/page.css", 200),
        ("/page/page.js", 200),
        ("/page/icon.svg", 200),
        ("/eaas/v1/snapshot", 200),
        ("/page/none", 404),
        ("/operator/x", 404),
    ):
        answer = httpx.get(f"{ui_fixture.url}{path}", timeout=60)
        assert answer.status_code == status
        policy = answer.headers["content-security-policy"]
        assert "unsafe" not in policy
        for rule in ("default-src 'none'", "script-src 'self'", "frame-ancestors 'none'"):
            assert f"{rule};" in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"


class _Elsewhere(http.server.BaseHTTPRequestHandler):
    """A page of another site."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.end_headers()
        self.wfile.write(b"<h1>Elsewhere</h1>")

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


@pytest.fixture
def elsewhere() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Elsewhere) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://localhost:{server.server_port}/"
        server.shutdown()
        thread.join()


def refusals(url: str) -> int:
    """Requests that the endpoint has refused with 403."""
    found = re.findall(
        r'^eaas_http_requests_total\{code="403".*\} (\S+)$',
        httpx.get(f"{url}/metrics", timeout=60).text,
        re.MULTILINE,
    )
    return sum(int(float(count)) for count in found)


def test_a_page_of_another_site_cannot_send_requests_or_frame(
    browser: Any, ui_fixture: UiFixture, elsewhere: str
) -> None:
    ui_fixture.show("small")
    with open_page(browser, elsewhere) as watched:
        before = refusals(ui_fixture.url)
        paths = "/eaas/v1/actions", "/eaas/v1/snapshot", "/?1", "/page/page.js"
        urls = [f"{ui_fixture.url}{path}" for path in paths]
        watched.page.evaluate(
            """async urls => {
                for (const url of urls) await fetch(url, {mode: "no-cors"}).catch(() => {});
                const post = {mode: "no-cors", method: "POST", body: '{"action": "rebalance"}'};
                await fetch(urls[0], post).catch(() => {});
                const frame = Object.assign(document.createElement("iframe"), {src: urls[2] + "2"});
                await new Promise(done => { frame.onload = done; document.body.append(frame); });
            }""",
            urls,
        )
        assert refusals(ui_fixture.url) == before + len(urls) + 2
        # A link works.
        watched.page.evaluate("url => { location.href = url }", f"{ui_fixture.url}/")
        watched.wait_text("members", "SERVING")
