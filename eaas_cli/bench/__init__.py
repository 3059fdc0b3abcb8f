"""Benchmarks for users (`eaas bench`), and the load generator of all benchmarks."""
