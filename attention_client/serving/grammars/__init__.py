"""Grammars that answers must follow: JSON schemas, regular expressions, choices, tool calls.

- `constraint`: the fields of a request that ask for one.
- `source`: a grammar as text, made of parts that llguidance reads.
- `check`: compiles a grammar in a process of its own, which may crash or hang on a hostile one.
- `compiler`: compiles checked grammars for the model's tokenizer, outside the event loop; keeps recent ones.
"""
