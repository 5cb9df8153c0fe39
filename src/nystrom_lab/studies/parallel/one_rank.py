"""One process of `nystrom bench ranks`, which ends when the process that started it ends.

Arguments: the measurement as JSON, then the folder in which the processes connect and write their results.
"""

import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nystrom.attention.registry import METHODS, find_function
from nystrom.parallel import count_bytes, parallelize
from nystrom.shapes import Group
from nystrom.whole_files import write_whole
from nystrom_lab.measure.memory import peak_megabytes
from nystrom_lab.training.grid.child import end_with_parent
from nystrom_lab.training.ranks.lost import leave

# Makes one call, and returns its times by name.
_Call = Callable[[], dict[str, float]]
# Tokens of the call that is not timed, in each process.
_SHORT = 512
_VOCABULARY = 1000


def main() -> int:
    """Measure, and write the result."""
    threading.Thread(target=end_with_parent, daemon=True).start()
    asked, folder = json.loads(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(asked["threads"])
    if asked["size"] > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder / 'ranks'}", rank=asked["rank"], world_size=asked["size"]
        )
    write_whole(folder / f"{asked['rank']}.json", json.dumps(_measure(asked)))
    leave()
    return 0


def _measure(asked: dict[str, Any]) -> dict[str, Any]:
    """The result of this process."""
    size = asked["size"]
    group: Group = dist.group.WORLD if size > 1 else None
    torch.manual_seed(asked["seed"] + asked["rank"])
    prepare = _attention if asked["what"] == "attention" else _encoder
    here = asked["n"] // size
    prepare(asked, min(_SHORT, here), group)()
    call, times = prepare(asked, here, group), []
    with count_bytes() as sent:
        for _ in range(asked["repeats"]):
            if group is not None:
                dist.barrier()
            times.append(call())
    return {
        "seconds": {name: [each[name] for each in times] for name in times[0]},
        "memory": peak_megabytes("cpu"),
        "bytes": sent.total // asked["repeats"],
    }


def options_of(method: str, landmarks: int) -> dict[str, int]:
    """Options that give a method this number of landmarks, features or clusters, if it has any."""
    names = METHODS[method].options.__dataclass_fields__
    return {name: landmarks for name in ("num_landmarks", "num_features", "num_clusters") if name in names}


def _attention(asked: dict[str, Any], here: int, group: Group) -> _Call:
    """One layer's attention, forward and backward, with `here` tokens in this process."""
    shape = asked["batch"], asked["heads"], here, asked["width"]
    q, k, v = (torch.randn(shape, dtype=getattr(torch, asked["dtype"]), requires_grad=True) for _ in range(3))
    grad = torch.randn_like(v)
    function, options = find_function(asked["method"]), options_of(asked["method"], asked["landmarks"])

    def call() -> dict[str, float]:
        begin = time.perf_counter()
        out: Tensor = function(q, k, v, group=group, **options)
        forward = time.perf_counter() - begin
        torch.autograd.grad(out, (q, k, v), grad)
        return {"forward time": forward, "forward+backward time": time.perf_counter() - begin}

    return call


def _encoder(asked: dict[str, Any], here: int, group: Group) -> _Call:
    """A training step, by AdamW, of an encoder that labels tokens; gradients are averaged over the processes."""
    from nystrom.models import EncoderConfig, EncoderForTokenClassification

    width = asked["heads"] * asked["width"]
    config = EncoderConfig(
        vocab_size=_VOCABULARY,
        hidden_size=width,
        num_hidden_layers=asked["layers"],
        num_attention_heads=asked["heads"],
        intermediate_size=4 * width,
        max_position_embeddings=asked["n"],
        conv_kernel_size=None,
        hidden_dropout_prob=0.0,
        attention=asked["method"],
        attention_options=options_of(asked["method"], asked["landmarks"]),
    )
    config.num_labels = 2
    with torch.random.fork_rng():
        # The same weights in all processes.
        torch.manual_seed(asked["seed"])
        model = EncoderForTokenClassification(config).to(getattr(torch, asked["dtype"]))
    if group is not None:
        parallelize(model, group)
    ids = torch.randint(_VOCABULARY, (asked["batch"], here))
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights)

    def call() -> dict[str, float]:
        begin = time.perf_counter()
        model(ids, labels=ids % 2).loss.backward()
        for weight in weights:
            if group is not None and weight.grad is not None:
                dist.all_reduce(weight.grad)
                weight.grad /= dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()
        return {"step time": time.perf_counter() - begin}

    return call


if __name__ == "__main__":
    sys.exit(main())
