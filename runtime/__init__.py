"""The wing that acts: compiles programs, places arrays and runs steps; it searches nothing."""
