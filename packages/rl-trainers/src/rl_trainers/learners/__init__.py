"""What learns from a batch: policy actor, critic, supervised and preference learners."""
