"""`python -m benchmarks.sampling`: the time to choose a step's next tokens."""
