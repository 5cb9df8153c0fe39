"""One fine-tuning or search, once its options are checked and its texts are read; see `finetune`."""

import torch

from nystrom_lab.config import FinetuneOptions
from nystrom_lab.training.finetune.classifier import find_classifier
from nystrom_lab.training.finetune.inputs import LabelledInputs
from nystrom_lab.training.finetune.run import FinetuneRun
from nystrom_lab.training.finetune.search import search_here, search_in_jobs
from nystrom_lab.training.grid.slurm import Jobs
from nystrom_lab.training.life import execute, leaving_the_group
from nystrom_lab.training.run_folder import RunFolder
from nystrom_lab.training.run_progress import no_file_bars


@leaving_the_group
def finetune_model(options: FinetuneOptions, run: RunFolder, labelled: LabelledInputs, cluster: Jobs | None) -> None:
    """Fine-tune a model on loaded texts, or search; see `finetune`.

    Args:
        options: The user's options, with device and precision resolved from "auto".
        run: The folder of the run, or of the search.
        labelled: The texts.
        cluster: Cluster on which the trials of a search run as jobs; None for this machine.
    """
    if options.threads is not None and cluster is None:
        torch.set_num_threads(options.threads)
    with no_file_bars():
        start = find_classifier(options.model, attention=options.attention, options=options.options)
        if options.grid:
            if cluster is None:
                search_here(options, start, labelled)
            else:
                search_in_jobs(options, start, labelled, cluster)
            return
        execute(FinetuneRun(options, run, start, labelled), resume=options.resume)
