"""The embedded engine: a transformers model whose experts run on expert servers."""
