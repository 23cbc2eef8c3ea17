"""One model over several ranks: which part each has, and what they must do together.

Every rank runs the same program on its share of the heads, of the MLP and of the vocabulary. The sums behind attention
and MLP give all ranks the same bits, so each can draw the same tokens; what the clock decides, rank 0 decides for all.
"""

from .group import ALONE, Alone, Group
from .shard import Share, split

__all__ = ["ALONE", "Alone", "Group", "Share", "split"]
