"""What one sees of a running cluster: the facts behind the dashboard and the terminal."""

from eaas.facts.model import Facts
from eaas.facts.reader import FactsReader

__all__ = ["Facts", "FactsReader"]
