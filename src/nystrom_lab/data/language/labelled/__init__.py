"""Texts, or pairs of them, with a class or a number each: GLUE, IMDB, and files of a user."""
