"""The asynchronous rollout runtime: admission, groups, staleness, batches."""
