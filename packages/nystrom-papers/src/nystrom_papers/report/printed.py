"""The numbers printed in the two papers: accuracies in percent, and ratios of instability scores, by registry name.

Accuracies in the Long Range Arena: Table 3 of Xiong et al. (2021), arXiv:2102.03902, and Table 1 of Chen et al. (2021),
arXiv:2111.00035, which gives means over three seeds. Neither says how far they vary with the seed.

Fine-tuning: Table 2 of Xiong et al. and Table 1 of its supplement. F1 for MRPC and QQP, accuracy elsewhere; MNLI
matched, and mismatched beside it. The supplement's caption says F1 for QQP alone, beside the same number for MRPC.

Instability scores over self-attention's: Table 1 in Appendix F of Chen et al., in the file of appendices that NeurIPS
publishes beside the paper.
"""

LRA_CLASSES = {"listops": 10, "text": 2, "retrieval": 2, "image": 10, "pathfinder": 2}
LRA_TASKS = tuple(LRA_CLASSES)

NYSTROMFORMER_TABLE_3: dict[str, tuple[float, float, float, float, float]] = {
    "softmax": (37.10, 65.02, 79.35, 38.20, 74.16),
    "reformer": (19.05, 64.88, 78.64, 43.29, 69.36),
    "linformer": (37.25, 55.91, 79.37, 37.84, 67.60),
    "performer": (18.80, 63.81, 78.62, 37.07, 69.87),
    "nystrom": (37.15, 65.52, 79.56, 41.58, 70.94),
}

SKYFORMER_TABLE_1: dict[str, tuple[float, float, float, float, float]] = {
    "softmax": (38.37, 61.95, 80.69, 40.57, 65.26),
    "kernelized": (38.78, 60.22, 81.77, 41.29, 70.73),
    "nystrom": (38.51, 64.83, 80.52, 41.30, 69.48),
    "linformer": (37.45, 58.93, 78.19, 37.96, 60.93),
    "informer": (32.53, 62.64, 77.57, 38.10, 57.83),
    "performer": (38.02, 64.19, 80.04, 41.43, 66.30),
    "reformer": (37.68, 62.93, 78.99, 48.87, 66.49),
    "bigbird": (39.25, 63.86, 80.28, 43.16, 68.72),
    "skyformer": (38.69, 64.70, 82.06, 40.77, 70.73),
}

PAPERS: dict[str, dict[str, tuple[float, float, float, float, float]]] = {
    "Nyströmformer T3": NYSTROMFORMER_TABLE_3,
    "Skyformer T1": SKYFORMER_TABLE_1,
}

FINETUNED: dict[str, dict[str, float]] = {
    "BERT-base": {
        "sst2": 90.0,
        "mrpc": 88.4,
        "qnli": 90.3,
        "qqp": 87.3,
        "mnli": 82.4,
        "mnli mismatched": 82.4,
        "imdb": 93.3,
    },
    "Nyströmformer": {
        "sst2": 91.4,
        "mrpc": 88.1,
        "qnli": 88.7,
        "qqp": 86.3,
        "mnli": 80.9,
        "mnli mismatched": 82.2,
        "imdb": 93.2,
    },
    "Nyströmformer (1024)": {
        "sst2": 91.4,
        "mrpc": 87.5,
        "qnli": 88.7,
        "qqp": 86.3,
        "mnli": 80.9,
        "mnli mismatched": 81.4,
        "imdb": 93.0,
    },
}

SKYFORMER_APPENDIX_F: dict[str, dict[str, float]] = {
    "nystrom": {"text": 1.03, "listops": 1.01, "retrieval": 0.97, "pathfinder": 0.99, "image": 1.02},
    "kernelized": {"text": 0.83, "listops": 0.77, "retrieval": 0.64, "pathfinder": 0.74, "image": 0.62},
    "skyformer": {"text": 0.81, "listops": 0.79, "retrieval": 0.64, "pathfinder": 0.79, "image": 0.65},
}
