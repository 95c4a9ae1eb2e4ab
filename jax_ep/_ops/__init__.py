"""dispatch and combine: checks, derivatives, halves, order."""
