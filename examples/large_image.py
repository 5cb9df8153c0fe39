"""A vision transformer over a picture of 1,024 x 1,024 pixels: 4,096 patches, with exact attention and with others.

The model is a ViT of transformers, small and with random weights unless --model names a trained one whose positions are
for such pictures. The attention changes by a name; the example prints the time and memory of a forward pass, and how
far the output is from that of exact attention.

    python examples/large_image.py
    python examples/large_image.py --pixels 1536 --methods near_far
"""

import argparse
import statistics
from pathlib import Path

import torch
from transformers import AutoModel, ViTConfig
from transformers.utils import logging

from nystrom.clock import seconds
from nystrom.integrations.model_loader import load_model
from nystrom_lab.measure.peak import peak_bytes


def main() -> None:
    """Read one picture with each attention."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of a ViT of transformers")
    parser.add_argument("--pixels", type=int, default=1024)
    parser.add_argument("--methods", nargs="+", default=["nystrom", "near_far"])
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    if args.pixels < 16 or args.pixels % 16 or args.repeats < 1:
        parser.error(f"expected pixels in a multiple of 16, and a repeat; came {args.pixels} and {args.repeats}")
    logging.set_verbosity_error()
    torch.manual_seed(0)
    if args.model is None:
        sizes = {"hidden_size": 192, "num_hidden_layers": 6, "num_attention_heads": 3, "intermediate_size": 768}
        model = AutoModel.from_config(ViTConfig(image_size=args.pixels, **sizes))
    else:
        model = load_model(args.model)[0].base_model
    # A picture of smooth fields: neighbours are alike, as in pictures of the world.
    coarse = torch.randn(1, 3, 2 + args.pixels // 64, 2 + args.pixels // 64)
    picture = torch.nn.functional.interpolate(coarse, size=(args.pixels, args.pixels), mode="bicubic")

    def read() -> torch.Tensor:
        with torch.no_grad():
            return model(pixel_values=picture).last_hidden_state

    exact = None
    for method in ("sdpa", *args.methods):
        model.eval().set_attn_implementation(method)
        states = read()
        took = statistics.median(seconds(read, torch.device("cpu")) for _ in range(args.repeats))
        memory = peak_bytes(read, torch.device("cpu")) / 1e6
        exact = states if exact is None else exact
        error = ((states - exact).norm() / exact.norm()).item()
        print(f"{method}: {states.shape[1]} tokens, {took:.2f} s, {memory:.0f} MB, error {error:.3f}")


if __name__ == "__main__":
    main()
