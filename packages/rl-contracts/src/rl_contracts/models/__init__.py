"""Model computations and checks that train engines and inference servers share."""
