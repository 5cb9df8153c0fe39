"""Attention whose tokens are cut over the ranks of a process group: `group` of every method's function.

Each rank holds a piece of every sequence, in the order of the ranks; pieces may have any sizes, none included, and
padding may be anywhere. It gets its piece of what one process would give for the whole, and so do the gradients, where
the loss is the sum of the losses of all ranks: weights that all ranks hold alike want their gradients summed over them.
All ranks call, forward and backward, in the same order.
"""

from nystrom.parallel.communication import Traffic, count_bytes
from nystrom.parallel.models import parallelize

__all__ = ["Traffic", "count_bytes", "parallelize"]
