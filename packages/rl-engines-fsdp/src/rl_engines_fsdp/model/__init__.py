"""Model: loading from a directory, the forward pass over packed sequences, and checks of its correctness."""
