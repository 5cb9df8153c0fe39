"""The ratios of instability scores to self-attention's that Skyformer printed, by method and task.

Source: Table 1 in Appendix F of Chen et al. (2021), arXiv:2111.00035.
"""

SKYFORMER_APPENDIX_F: dict[str, dict[str, float]] = {
    "nystrom": {"text": 1.03, "listops": 1.01, "retrieval": 0.97, "pathfinder": 0.99, "image": 1.02},
    "kernelized": {"text": 0.83, "listops": 0.77, "retrieval": 0.64, "pathfinder": 0.74, "image": 0.62},
    "skyformer": {"text": 0.81, "listops": 0.79, "retrieval": 0.64, "pathfinder": 0.79, "image": 0.65},
}
