"""Tensor parallelism: the share of the model that each rank has, and the collectives between ranks.

Every rank runs the same program on its share of the heads, the MLP and the vocabulary. The all-reduce behind attention
and MLP gives all ranks the same bits, so each samples the same tokens. Rank 0 decides whatever depends on the clock.
"""

from .shard import ALONE, Alone, Group, Share, split

__all__ = ["ALONE", "Alone", "Group", "Share", "split"]
