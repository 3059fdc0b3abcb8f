"""The HTTP endpoint of an attention client: OpenAI's API over any transformers causal model.

Imports nothing: the prompt worker process must not pay for torch.
"""
