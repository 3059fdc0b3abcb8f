"""From the body of a request to its settings and the tokens of its prompt.

- `length`: how few tokens a text can have, by its length alone.
- `reader`: parses, applies the chat template, tokenizes.
- `pool`: where that happens, so that no other request's stream waits: in a thread, or in the worker.
- `worker`, `worker_process`: a process that reads large bodies. It loads no torch, so it starts fast.
"""
