"""Readers of users' files: published archives, and files of rows."""
