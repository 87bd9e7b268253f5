"""TrainEngine on PyTorch FSDP2 and DTensor, on CPU and GPU."""
