"""What plans mean, told from their files alone."""
