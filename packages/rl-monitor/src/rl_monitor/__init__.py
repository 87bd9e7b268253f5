"""Read run directories: report, live view, answers, curves. Needs rl-contracts alone, and no torch."""
