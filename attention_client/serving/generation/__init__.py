"""Token generation for the HTTP endpoint: continuous batching, sampling, admission."""
