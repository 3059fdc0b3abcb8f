"""Products with a model's dense weights, in bfloat16, on processors for which torch has slower ones."""
