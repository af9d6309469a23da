"""The command line: calls the door, draws what comes back, and tells how it ended."""
