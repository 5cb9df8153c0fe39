"""Pretraining on masked words and sentence order: what it starts from, its steps, its scores and its results."""
