"""`python -m nystrom_lab`, which is what `torchrun -m nystrom_lab` runs in each process."""

import sys

from nystrom_lab.cli.main import main

sys.exit(main())
