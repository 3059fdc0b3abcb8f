"""Token generation in the attention client: continuous batching, sampling, admission."""
