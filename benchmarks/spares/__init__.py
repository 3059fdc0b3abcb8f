"""`python -m benchmarks.spares`: predictors and transfer times of spare slots."""
