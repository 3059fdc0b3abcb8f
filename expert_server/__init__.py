"""The expert server: a share of a model's experts behind slots."""

from expert_server.main import ExpertServer

__all__ = ["ExpertServer"]
