"""Numbers that are not finite end a training, a scoring or a prediction: the largest of them would be class 0."""

from typing import Any

import torch


class NotFinite(FloatingPointError):
    """A loss, a weight or an output is not a finite number; the message says where."""


def check_outputs(outputs: Any) -> Any:
    """Check the outputs of a model before anything is computed from them, and return them.

    Args:
        outputs: Logits or numbers, samples first; or a tuple that begins with them, as some models return.

    Raises:
        NotFinite: One of them is NaN or infinite.
    """
    logits = outputs[0] if isinstance(outputs, tuple) else outputs
    finite = torch.isfinite(logits)
    if not finite.all():
        wrong = int((~finite.reshape(len(finite), -1).all(dim=1)).sum())
        dtype = str(logits.dtype).removeprefix("torch.")
        way = "train it again" if dtype == "float32" else "use --precision float32"
        raise NotFinite(
            f"the outputs of the model are not finite ({logits[~finite][0].item()}, for {wrong} of {len(finite)} in a "
            f"batch): it diverged, or its numbers are too large for {dtype}; {way}"
        )
    return outputs
