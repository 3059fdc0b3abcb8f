"""Benchmarks for users (`eaas bench`), and what the benchmarks of a clone share with them."""
