"""The gRPC contract."""
