"""What methods carry from batch to batch."""

from dpl.memory.prototypes import update_class_memory

__all__ = ["update_class_memory"]
