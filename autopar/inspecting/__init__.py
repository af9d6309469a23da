"""What a plan means and could have been, told from its file alone."""
