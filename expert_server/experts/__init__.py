"""The experts that a server holds: loading, unloading, storage."""
