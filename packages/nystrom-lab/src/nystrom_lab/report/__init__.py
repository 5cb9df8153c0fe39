"""Tables and figures of rows; measures nothing and needs no torch."""
