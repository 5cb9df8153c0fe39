import os

import torch

if not torch.cuda.is_available():
    # Triton reads this when it is first imported: its kernels then run on the CPU.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# pytest-xdist runs a worker per core; a second thread in each would only wait.
torch.set_num_threads(1)
