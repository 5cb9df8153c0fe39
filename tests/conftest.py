import torch

# pytest-xdist runs a worker per core; a second thread in each would only wait.
torch.set_num_threads(1)
