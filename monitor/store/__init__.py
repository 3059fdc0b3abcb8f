"""The monitor's persistent state: an SQLite file, or ZooKeeper."""

from monitor.store.kept import Change, Kept, Store, StoreLostError

__all__ = ["Change", "Kept", "Store", "StoreLostError"]
