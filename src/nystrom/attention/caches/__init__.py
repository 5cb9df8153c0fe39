"""What near_far keeps of tokens that later queries attend to: a bounded cache, and a context compressed once."""
