"""Models and steps that use other packages, each as its users write it."""
