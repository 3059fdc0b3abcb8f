"""`python -m eaas` has moved to `python -m eaas_cli`."""

import sys

sys.exit("eaas: error: run `eaas`, or `python -m eaas_cli`")
