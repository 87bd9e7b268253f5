"""Workers on several machines, through an agent on each."""
