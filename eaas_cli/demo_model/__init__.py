"""Random models for trying the system, without a download: small ones, or like published ones."""

from eaas_cli.demo_model.architectures import ARCHITECTURES
from eaas_cli.demo_model.write import write_demo_model, write_model_like

__all__ = ["ARCHITECTURES", "write_demo_model", "write_model_like"]
