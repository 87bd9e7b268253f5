"""What train engines and inference servers must compute in the same way."""
