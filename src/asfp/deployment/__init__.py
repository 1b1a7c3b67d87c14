"""What is done to a network for a file: batch norms are folded, and channels are where an engine is fast with them."""
