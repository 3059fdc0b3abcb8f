"""vLLM with its experts on servers, beside vLLM with local experts and beside the embedded engine."""
