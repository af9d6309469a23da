"""The meaning of a plan, and its alternatives, told from its file alone."""
