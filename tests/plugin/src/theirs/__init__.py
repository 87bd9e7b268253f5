"""Parts of every kind that somebody else wrote: they know the contracts, and no package that implements them."""
