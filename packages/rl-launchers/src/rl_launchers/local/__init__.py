"""Workers on one machine."""
