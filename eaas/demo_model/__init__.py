"""Small random models to try the system with; no download, seconds to write."""

from eaas.demo_model.architectures import ARCHITECTURES
from eaas.demo_model.write import write_demo_model

__all__ = ["ARCHITECTURES", "write_demo_model"]
