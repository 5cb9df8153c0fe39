"""What the blocks of an encoder are made of: activations, dropout, rotary positions and short convolutions."""
