"""How the models of each family write an answer: one JSON file a family, and what reads them.

- `family`: the file of a family, the format of calls that a grammar forces, the choice for a checkpoint.
- `markup`: a family's markup as a tokenizer writes it.
- `reader`: splits an answer into reasoning, calls and text, of which the answers of all APIs are made.
"""
