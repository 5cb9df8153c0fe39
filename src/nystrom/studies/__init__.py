"""Measurements: each study runs, writes its rows and returns them; `nystrom.report` draws them."""
