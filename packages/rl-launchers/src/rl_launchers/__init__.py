"""Local, Ray and Slurm schedulers and the launcher that uses them."""
