"""The tables, figures and claims of the papers as studies with names."""
