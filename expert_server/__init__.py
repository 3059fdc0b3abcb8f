"""The expert server process: computes a share of a model's experts for requests in its slots."""

from expert_server.main import ExpertServer

__all__ = ["ExpertServer"]
