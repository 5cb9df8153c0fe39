"""The ways to launch the operations of a measured call.

- "eager": Python launches them one by one.
- "compiled": `torch.compile` makes one program of the forward pass, and one of its backward pass, for one length.
- "graph": a CUDA graph, recorded once, replays all operations of the call; Python launches the graph alone.

All graphs of a length record into one pool of memory: they are replayed one at a time, and none reads what another has
written. A replay allocates nothing, so the peak memory of a graph is that of the call that it recorded.

Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from nystrom_papers.bench.inputs import Call


def compiled(call: Call) -> Call:
    """The call with a forward pass that torch compiles when it is first made."""
    return Call(torch.compile(call.forward, fullgraph=True, dynamic=False), call.leaves)


@contextmanager
def compiling(cells: int) -> Iterator[None]:
    """Context for calls of so many compiled cells.

    All methods of a model share the function that calls it, and torch limits the compilations of a function. A cell may
    be compiled twice, since its peak memory on a CPU is measured on one thread.
    """
    if not cells:
        yield
        return
    import torch._dynamo

    # Compilations for other lengths count, too.
    torch.compiler.reset()
    with torch._dynamo.config.patch(recompile_limit=max(torch._dynamo.config.recompile_limit, 2 * cells)):
        yield


class Recorder:
    """Records CUDA graphs that share their memory."""

    def __init__(self, device: torch.device):
        self._device = device
        self._stream, self._pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()

    def record(self, step: Callable[[], object], clear: Callable[[], None]) -> Callable[[], None]:
        """Record a step, and return the function that replays it.

        Args:
            step: Makes the call.
            clear: Drops the gradients of the call before, so that the graph writes them and does not add to them.
        """
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        # This context also leaves the stream where a capture fails, as torch's own then does not.
        with torch.cuda.stream(self._stream):
            clear()
            # Libraries get their memory for this stream now: a capture may not ask for it.
            step()
            clear()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                step()
            clear()
        return graph.replay
