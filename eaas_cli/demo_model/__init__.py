"""Small random models for trying the system, written in seconds without a download."""

from eaas_cli.demo_model.architectures import ARCHITECTURES
from eaas_cli.demo_model.write import write_demo_model

__all__ = ["ARCHITECTURES", "write_demo_model"]
