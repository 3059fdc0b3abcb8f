"""Benchmarks of this project. Each compares two things in one run and reports their ratio."""
