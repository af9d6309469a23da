"""The planned step beside the plain one, on virtual CPU devices."""
