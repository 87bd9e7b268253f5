"""What a run writes: metrics, rollouts, checkpoints, evaluations, trackers."""
