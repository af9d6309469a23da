"""The planner: from a request to a plan, and from a saved plan back to its programs."""
