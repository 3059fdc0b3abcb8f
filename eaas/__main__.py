"""`python -m eaas`: the same as the `eaas` program."""

from eaas.cli import main

main()
