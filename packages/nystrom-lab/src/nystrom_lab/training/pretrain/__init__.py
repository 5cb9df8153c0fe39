"""Pretraining on masked words and sentence order: the starting model, steps, scores and results."""
