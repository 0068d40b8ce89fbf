"""Which job holds and uses which GPU."""
