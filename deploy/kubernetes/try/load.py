"""The load of try.sh, in a pod: closed-loop streams, each compared with its answer before the events.

The last line of the file EVENT names the current event; `stop` ends the load. The table is the last output.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
import time
from pathlib import Path

import httpx

from eaas.net.api_keys import authorization
from eaas.net.http_client import http_settings
from eaas_cli.bench.stream import Answer, ask

EVENT = Path("/tmp/event")
STREAMS, PROMPTS, TOKENS = 4, 8, 48
_READ_S = 120.0
_REACHED_S = 60
# A longer pause is reported in a line of its own.
_LONG_S = 2.0


def prompt(index: int) -> list[int]:
    """Token ids of one of the prompts."""
    return [16 + (37 * index + 11 * position) % 230 for position in range(24 + index)]


def current_event() -> str:
    """Name of the event that try.sh has begun last."""
    return EVENT.read_text().splitlines()[-1]


class Load:
    """Streams until the event is `stop`; counts by event."""

    def __init__(self, client: httpx.AsyncClient, url: str) -> None:
        self._client = client
        self._url = url
        self._expected: list[str] = []
        # By event: requests, failed requests, wrong answers, longest pause between two tokens in seconds.
        self.rows: dict[str, list[float]] = {}

    async def expect(self) -> None:
        """Get each prompt's answer from the undisturbed cluster, twice: the answers must be equal."""
        # The network of a new pod, with its policies, may not work at once.
        for _ in range(_REACHED_S):
            with contextlib.suppress(httpx.ConnectError):
                await self._client.get(f"{self._url}/live")
                break
            await asyncio.sleep(1.0)
        for _ in range(2):
            answers = [await self._ask(index) for index in range(PROMPTS)]
            if errors := [answer.error for answer in answers if answer.error]:
                sys.exit(f"before the events: {errors[0]}")
            texts = [answer.text for answer in answers]
            if self._expected not in ([], texts):
                sys.exit("before the events: two answers to one prompt differ")
            self._expected = texts

    async def run(self) -> None:
        """Send requests from all streams until the event is `stop`."""
        indices = itertools.cycle(range(PROMPTS))

        async def stream() -> None:
            while current_event() != "stop":
                index = next(indices)
                answer = await self._ask(index)
                self._count(index, answer)
                if answer.error:
                    # A cluster that is down must not be asked in a busy loop.
                    await asyncio.sleep(1.0)

        await asyncio.gather(*(stream() for _ in range(STREAMS)))

    async def _ask(self, index: int) -> Answer:
        return await ask(self._client, self._url, prompt(index), TOKENS)

    def _count(self, index: int, answer: Answer) -> None:
        event = current_event()
        row = self.rows.setdefault(event, [0, 0, 0, 0.0])
        is_wrong = not answer.error and answer.text != self._expected[index]
        first_s = answer.stamps_s[0] - answer.sent_s if answer.stamps_s else 0.0
        row[0] += 1
        row[1] += bool(answer.error)
        row[2] += is_wrong
        pause_s = max(answer.stall_s, first_s)
        row[3] = max(row[3], pause_s)
        if answer.error or is_wrong or pause_s > _LONG_S:
            print(
                f"{time.strftime('%T')} {event}: {answer.error or ('wrong answer' if is_wrong else 'slow')}; "
                f"{answer.ended_s - answer.sent_s:.2f} s, first token after {first_s:.2f} s, "
                f"longest pause {answer.stall_s:.2f} s",
                flush=True,
            )


async def main(url: str) -> None:
    """Run the load against an endpoint, then print the table."""
    timeout = httpx.Timeout(10.0, read=_READ_S)
    async with httpx.AsyncClient(
        **http_settings(url), headers=authorization(), timeout=timeout
    ) as client:
        load = Load(client, url)
        await load.expect()
        EVENT.write_text("none\n")
        print("the load begins", flush=True)
        await load.run()
    print("| event | requests | failed | wrong | longest pause (s) |\n|---|---|---|---|---|")
    for event, (requests, failed, wrong, pause_s) in load.rows.items():
        print(f"| {event} | {requests:.0f} | {failed:.0f} | {wrong:.0f} | {pause_s:.2f} |")
    sys.exit(any(failed or wrong for _, failed, wrong, _ in load.rows.values()))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
