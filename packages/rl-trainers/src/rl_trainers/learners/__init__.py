"""Learners: policy actor, critic, supervised learning and preference learning."""
