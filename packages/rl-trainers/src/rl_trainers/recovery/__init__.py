"""Recovery checkpoints: write, find, restore."""
