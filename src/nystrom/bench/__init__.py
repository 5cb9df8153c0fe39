"""Studies that measure: each runs, writes its rows and returns them; `nystrom.report` draws them."""
