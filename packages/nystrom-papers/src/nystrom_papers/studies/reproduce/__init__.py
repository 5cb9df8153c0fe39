"""The tables, figures and claims of the papers, each a study with a name."""
