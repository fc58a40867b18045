"""What both services agree on. Nothing in this package imports torch."""
