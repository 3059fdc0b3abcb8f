"""Expert-as-a-Service: what the four services share (contract, wire, types, errors, config)."""

import os

__version__ = "0.1.0"

__all__ = ["__version__"]

# gRPC's event engine has threads that look for work again and again for a while after each message: a third
# of what an idle cluster costs. Without it whoever waits for a call polls by itself. gRPC reads this once,
# when it is first used.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")
# gRPC itself writes a line for each TLS handshake that fails: anybody who can connect could fill the disk.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
