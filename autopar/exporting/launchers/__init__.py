"""The files that start a script on a plan's cluster, as four engines take them."""
