"""The data that flows between rooms: graphs, shardings, plans and programs, without JAX."""
