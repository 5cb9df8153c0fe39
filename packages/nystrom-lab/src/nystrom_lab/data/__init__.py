"""Tasks of the two papers: `lra` makes and opens them, `sources` reads users' files, `store` keeps prepared data."""
