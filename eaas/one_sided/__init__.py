"""One-sided writes into another process's memory, for the nixl transport."""

from eaas.one_sided.agent import Agent, Region, nixl_version, why_not
from eaas.one_sided.poller import Poller

__all__ = ["Agent", "Poller", "Region", "nixl_version", "why_not"]
