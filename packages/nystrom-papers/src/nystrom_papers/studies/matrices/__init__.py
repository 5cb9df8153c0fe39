"""The Nyström method on dense matrices, and spectra: what the studies of both papers need."""
