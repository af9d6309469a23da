"""The batch pass: finds the rows of the batch and proves that microbatches are exact."""
