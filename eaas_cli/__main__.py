"""`python -m eaas_cli`: the same as the `eaas` program."""

from eaas_cli import main

main()
