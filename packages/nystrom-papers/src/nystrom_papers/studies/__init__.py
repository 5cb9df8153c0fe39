"""Measurements: each study runs, writes its rows and returns them; `nystrom_lab.report` shows and draws them."""
