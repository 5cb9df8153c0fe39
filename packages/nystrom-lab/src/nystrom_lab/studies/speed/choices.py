"""The choices that the speed measurements offer, without torch: the command line reads them before it loads torch."""

from typing import Literal

Pass = Literal["forward", "forward+backward"]
Skip = Literal["without", "with", "both"]
Layout = Literal["tokens", "heads"]
Dtype = Literal["float32", "float64", "bfloat16", "float16"]
StepDtype = Literal["float32", "bfloat16"]
