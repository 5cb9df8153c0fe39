"""Measurements of pretraining on masked words and sentence order."""
