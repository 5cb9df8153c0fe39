"""The accuracies in the Long Range Arena that the two papers printed, in percent, by the names of the registry.

Neither says how far they move with the seed. The tasks are those of `LRA_TASKS`, in its order.

Source: Table 3 of Xiong et al. (2021), arXiv:2102.03902; Table 1 of Chen et al. (2021), arXiv:2111.00035, which gives
means over three seeds.
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
