"""Plans written for others, and others' rules."""
