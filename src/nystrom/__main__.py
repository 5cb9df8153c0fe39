"""`python -m nystrom`, which is what `torchrun -m nystrom` runs in each process."""

import sys

from nystrom.cli.main import main

sys.exit(main())
