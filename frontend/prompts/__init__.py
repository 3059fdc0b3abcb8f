"""Reads request bodies for the HTTP endpoint, before generation: JSON to settings and prompt tokens.

- `body`, `messages`, `constraint`: what bodies have in common, and their parts.
- `bodies`, `anthropic_body`, `responses_body`: each path's body; `converted`: other APIs' as a chat request.
- `reader`: parses a body, applies the chat template, tokenizes; `history`: in the form that a template shows.
- `pool`: runs the reader in a thread or a process, so that other streams do not wait. The process reads large
  bodies, and starts fast, without torch.
"""
