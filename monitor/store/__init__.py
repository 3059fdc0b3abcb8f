"""Where what the monitor knows survives it: a file of its own, or ZooKeeper."""

from monitor.store.kept import Change, Kept, Store, StoreLostError

__all__ = ["Change", "Kept", "Store", "StoreLostError"]
