"""Memories that methods carry from batch to batch, as functions of tensors.

A memory knows no network, method or file: the method declares the tensors as its state and passes them in.
"""

from dpl.memory.bank import (
    BankPolicy,
    BankRecord,
    ReservoirRecord,
    empty_record,
    empty_reservoir,
    insert_reservoir,
    insert_timely,
    occupied_by_age,
)
from dpl.memory.class_memory import update_class_memory
from dpl.memory.ema import ema_update, restore_randomly, share_frozen
from dpl.memory.queue import neighbour_vote, write_ring
from dpl.memory.supports import (
    insert_supports,
    lowest_in_class,
    nearest_supports,
    rank_in_class,
    support_means,
    support_sums,
)

__all__ = [
    "BankPolicy",
    "BankRecord",
    "ReservoirRecord",
    "ema_update",
    "empty_record",
    "empty_reservoir",
    "insert_reservoir",
    "insert_supports",
    "insert_timely",
    "lowest_in_class",
    "nearest_supports",
    "neighbour_vote",
    "occupied_by_age",
    "rank_in_class",
    "restore_randomly",
    "share_frozen",
    "support_means",
    "support_sums",
    "update_class_memory",
    "write_ring",
]
