"""Plans beside the truth: run on virtual devices, and compiled by the hardware's own compiler."""
