"""The HTTP endpoint of an attention client: OpenAI's API over any transformers causal model.

Imports nothing, so that the prompt worker process does not load torch.
"""
