"""The decision model of a step: what is to be chosen, what each choice costs and holds."""
