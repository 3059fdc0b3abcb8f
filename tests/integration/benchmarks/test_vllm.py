"""`python -m benchmarks.vllm`, small: a cluster with the demo model, and a stand-in for llama.cpp."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

# Answers at once, with as many words as tokens are asked for.
_STAND_IN = f"""#!{sys.executable}
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer(b"ok")

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        tokens = asked["max_tokens"]
        events = [{{"choices": [{{"text": "a "}}]}}] * tokens
        events += [{{"choices": [], "usage": {{"completion_tokens": tokens}}}}]
        lines = ["data: " + json.dumps(event) for event in events] + ["data: [DONE]"]
        self.answer("\\n\\n".join(lines).encode())

    def answer(self, body):
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

port = int(sys.argv[sys.argv.index("--port") + 1])
ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def test_engines_take_turns(tmp_path: Path) -> None:
    server, gguf = tmp_path / "llama-server", tmp_path / "model.gguf"
    server.write_text(_STAND_IN)
    server.chmod(0o755)
    gguf.touch()
    words = f"--llama-server {server} --gguf {gguf} --vllm-python none --engines transformers"
    small = "--servers 1 --streams 1,2 --prompts 8 --max-tokens 16 --rounds 1 --json"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.vllm"),
            *words.split(),
            *small.split(),
        ],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["reference"] == "llama.cpp"
    rows = {(row["entrant"], row["streams"]): row for row in document["rows"]}
    ours = "transformers, 1 expert server"
    assert list(rows) == [(engine, n) for n in (1, 2) for engine in (ours, "llama.cpp")]
    for (engine, _), row in rows.items():
        assert row["tokens_per_s"] > 0
        assert row["ttft_ms"]["p50"] > 0
        assert (row["ratio"] == row["ttft_ratio"] == 1) == (engine == "llama.cpp")
        # The stand-in computes nothing.
        assert row["ratio"] <= 1
