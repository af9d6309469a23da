"""Times what devices do: matmuls, passes over memory, tiny ops and collectives."""
