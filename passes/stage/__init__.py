"""The stage pass: assigns ranges of layers to submeshes by dynamic programming."""
