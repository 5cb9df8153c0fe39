"""Building blocks of encoders: activations, dropout, rotary positions and short convolutions."""
