"""From a step to stage programs: microbatches, layers, priced stages, sharded submeshes."""
