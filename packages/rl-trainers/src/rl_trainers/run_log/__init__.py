"""Output of a run: metrics, rollouts, checkpoints, evaluations, trackers."""
