"""The data sets of the Long Range Arena, at their published sizes and at those of a first look.

The two papers give Text 4,000 bytes, where the authors of the Long Range Arena gave it 1,000.

Source: Tay et al. (2021), arXiv:2011.04006, and the code of the two papers.
"""

from nystrom.train.presets.preset import DataSizes

LISTOPS = DataSizes("listops", train=96_000, val=2_000, test=2_000, min_length=500, max_length=2_000)
TEXT = DataSizes("text", train=25_000, val=25_000, test=25_000, min_length=0, max_length=4_000)
RETRIEVAL = DataSizes("retrieval", train=147_086, val=18_090, test=17_437, min_length=0, max_length=4_000)
IMAGE = DataSizes("image", train=45_000, val=5_000, test=10_000, min_length=0, max_length=1_024)
PATHFINDER = DataSizes("pathfinder", train=160_000, val=20_000, test=20_000, min_length=0, max_length=1_024)

LISTOPS_DEMO = DataSizes("listops-demo", train=16_000, val=1_000, test=2_000, min_length=16, max_length=512)
TEXT_DEMO = DataSizes("text-demo", train=25_000, val=25_000, test=25_000, min_length=0, max_length=512)
RETRIEVAL_DEMO = DataSizes("retrieval-demo", train=147_086, val=18_090, test=17_437, min_length=0, max_length=512)
PATHFINDER_DEMO = DataSizes("pathfinder-demo", train=16_000, val=1_000, test=2_000, min_length=0, max_length=1_024)
