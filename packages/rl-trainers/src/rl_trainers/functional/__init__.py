"""Pure functions: tensors in, sums and statistics out. No engine, no logging, no state."""
