"""Attention whose tokens are split across the ranks of a process group: `group` of functions and layers.

Each rank holds a piece of every sequence, in the order of the ranks; pieces may have any size, including zero, and
padding may be anywhere. Each rank gets its piece of the result that a single process would compute. The same holds for
gradients if the loss is the sum of the losses of all ranks: sum the gradients of replicated weights over the ranks. All
ranks must make the same calls, forward and backward, in the same order. A call with a group raises until this package
is imported.
"""

from nystrom.attention.group_runner import GroupRunner, pass_group_runner
from nystrom.parallel.communication import Traffic, count_bytes
from nystrom.parallel.entry_over_ranks import attend_over_ranks
from nystrom.parallel.models import parallelize
from nystrom.parallel.skip_over_ranks import add_skip_over_ranks

__all__ = ["Traffic", "count_bytes", "parallelize"]

pass_group_runner(GroupRunner(attend_over_ranks, add_skip_over_ranks))
