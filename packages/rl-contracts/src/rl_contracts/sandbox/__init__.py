"""Run untrusted Python code in a confined process."""
