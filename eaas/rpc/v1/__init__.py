"""Generated from proto/eaas/rpc/v1; do not edit (see `make proto`)."""
