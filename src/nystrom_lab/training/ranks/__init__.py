"""A run over several processes: what each of them takes of a batch, and what happens when one is lost."""
