"""Arguments of a local cluster's processes."""

from __future__ import annotations

from pathlib import Path

from eaas.config import load_config
from eaas_cli.local.arguments import client_words, vllm_words


def test_the_names_of_the_model_reach_both_engines() -> None:
    named = load_config(attention_client={"served_model_name": ["big", "gpt-4o"]})
    for words in (client_words, vllm_words):
        given = words(named, "a", "m:1", Path("/models/demo"), operator_page=False)
        assert given[-4:] == ("--served-model-name", "big", "--served-model-name", "gpt-4o")
        plain = words(load_config(), "a", "m:1", Path("/models/demo"), operator_page=False)
        assert "--served-model-name" not in plain
