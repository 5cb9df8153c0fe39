"""The Nyström method on dense matrices, draws of their columns, and spectra: what the studies of both papers need."""
