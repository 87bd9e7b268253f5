"""The ranks: process group, layout, what is split over them, and the collectives that gradients run through."""
