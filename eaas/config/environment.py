"""Names of environment variables that are not settings of `cluster.yaml`."""

__all__ = ["ENDPOINT_VARIABLE", "KEY_VARIABLE"]

KEY_VARIABLE = "EAAS_API_KEY"
"""An API key: required by the endpoint, sent by commands."""

ENDPOINT_VARIABLE = "EAAS_ENDPOINT"
"""URL of the endpoint for commands without `--endpoint`."""
