"""Measurements as rows, with the clock and memory measures behind them."""
