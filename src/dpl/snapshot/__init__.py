"""Durable snapshots: complete or invisible, checked byte by byte, unable to run code."""

from dpl.snapshot.files import read_manifest, read_snapshot, write_snapshot
from dpl.snapshot.store import SnapshotStore

__all__ = ["SnapshotStore", "read_manifest", "read_snapshot", "write_snapshot"]
