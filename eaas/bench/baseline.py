"""The same model in one process, with transformers alone: what a cluster is compared with.

Same HTTP face and same batching engine (both transformers'), transformers' own experts, no server. Run as
`python -m eaas.bench.baseline MODEL EXPERTS_IMPLEMENTATION THREADS` by the benchmark.
"""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path

from eaas.local.child import announce, bind_to_launcher
from eaas.log import configure_logging

__all__ = ["main"]


def main(model_path: str, experts_implementation: str, threads: str) -> None:
    """Serve until SIGTERM."""
    bind_to_launcher()
    configure_logging("baseline")
    stopping = threading.Event()
    signal.signal(
        signal.SIGTERM,
        lambda *_: threading.Thread(target=stopping.set, daemon=True).start(),
    )
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from attention_client.serve import HttpServer, ServeLimits, bind, build_app
    from eaas.config import AttentionClientConfig

    torch.set_num_threads(int(threads))
    config = AttentionClientConfig()
    model = AutoModelForCausalLM.from_pretrained(
        model_path,
        local_files_only=True,
        dtype="auto",
        experts_implementation=experts_implementation,
    ).eval()
    tokenizer = AutoTokenizer.from_pretrained(model_path, local_files_only=True)
    listener = bind("127.0.0.1", 0)
    app = build_app(
        model,
        tokenizer,
        model_name=Path(model_path).name,
        status=dict,
        healthy=lambda: (True, ""),
        limits=ServeLimits(
            num_blocks=config.cache_blocks,
            page_size=config.cache_block_tokens,
            max_batch_tokens=config.max_batch_tokens,
        ),
    )
    server = HttpServer(app, "127.0.0.1", 0, listener)
    server.start()
    announce(ready=f"http://127.0.0.1:{listener.getsockname()[1]}")
    stopping.wait()
    server.stop(1.0)


if __name__ == "__main__":
    main(*sys.argv[1:4])
