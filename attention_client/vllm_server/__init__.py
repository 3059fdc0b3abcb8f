"""vLLM's API server as an attention client: how `eaas vllm` runs it, and what its HTTP endpoint gets here.

The engine in vLLM's worker processes is `attention_client.engines.vllm`.
"""
