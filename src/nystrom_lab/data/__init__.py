"""Tasks of the two papers: `lra` makes and opens them, `sources` reads what users hold, `store` keeps prepared sets."""
