"""Reads request bodies for the HTTP endpoint, before generation: JSON to settings and prompt tokens.

- `reader`: parses a body, applies the chat template, tokenizes.
- `pool`: runs the reader in a thread or in the worker process, so that other streams do not wait.
- `worker`, `worker_process`: the process that reads large bodies. It starts fast, without torch.
- `length`: the least number of tokens of a text, from its length alone.
"""
