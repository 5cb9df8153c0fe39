"""What the runs of `nystrom lra run` say beside the papers' tables."""
