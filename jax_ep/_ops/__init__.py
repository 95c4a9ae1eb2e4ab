"""dispatch and combine: checks, derivatives, asynchronous forms, order of calls."""
