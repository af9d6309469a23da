"""The means by which arrays travel between submeshes: in one process, or between several."""
