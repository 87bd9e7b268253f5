"""TrainEngine on megatron-core."""
