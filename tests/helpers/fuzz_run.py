"""`python -m fuzz_run TARGET [libFuzzer options and directories]`: run atheris on one of `fuzz_targets`."""

from __future__ import annotations

import sys

import atheris

# Only this project's parsers: instrumenting other packages would be slow.
with atheris.instrument_imports(include=["eaas.wire", "eaas.types", "fuzz_targets"]):
    from fuzz_targets import TARGETS


def main(target: str, *options: str) -> None:
    """Run until libFuzzer's limits or until the target fails."""
    atheris.Setup(["fuzz_run", *options], TARGETS[target])
    atheris.Fuzz()


if __name__ == "__main__":
    main(*sys.argv[1:])
