"""The engines behind a frontend: which one has a sequence, and how it goes on when that one dies.

- `pool`: sequences and engines as one state machine, without input, output or a clock.
- `links`: the connections to engines, and the `Engine` that they are together.
- `choice`: the engine for a sequence: by what its cache has, and by its load.
"""
