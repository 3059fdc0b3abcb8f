"""The monitor's persistent state, in an SQLite file or in ZooKeeper, and the election of the leader."""

from monitor.store.kept import Change, Kept, Store, StoreLostError

__all__ = ["Change", "Kept", "Store", "StoreLostError"]
