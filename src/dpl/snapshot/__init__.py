"""Durable snapshots: complete or absent, checked byte by byte, unable to run code.

Here live one snapshot (files) and a folder of numbered ones (store). What is saved is no business of this folder:
it knows tensors and plain data, no model and no method.
"""

from dpl.snapshot.files import read_manifest, read_snapshot, write_snapshot
from dpl.snapshot.store import SnapshotStore

__all__ = ["SnapshotStore", "read_manifest", "read_snapshot", "write_snapshot"]
