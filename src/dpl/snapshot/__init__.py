"""Durable snapshots: complete or absent, checked byte by byte, unable to run code.

What is saved is no business of this folder: it knows tensors and plain data, no model and no method.
"""

from dpl.snapshot.files import SnapshotStore, read_manifest, read_snapshot, write_snapshot

__all__ = ["SnapshotStore", "read_manifest", "read_snapshot", "write_snapshot"]
