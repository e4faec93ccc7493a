"""What methods carry from batch to batch, as pure functions."""

from dpl.memory.bank import BankRule, Slots, empty_slots, offer, offer_by_lot, oldest_first
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
    "BankRule",
    "Slots",
    "ema_update",
    "empty_slots",
    "insert_supports",
    "lowest_in_class",
    "nearest_supports",
    "neighbour_vote",
    "offer",
    "offer_by_lot",
    "oldest_first",
    "rank_in_class",
    "restore_randomly",
    "share_frozen",
    "support_means",
    "support_sums",
    "update_class_memory",
    "write_ring",
]
