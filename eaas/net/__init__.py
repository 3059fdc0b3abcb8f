"""Network: gRPC servers and channels, TLS, authorisation, API keys, listen policy."""
