"""Texts, or pairs of texts, each with a class or a number: GLUE, IMDB, and a user's own files."""
