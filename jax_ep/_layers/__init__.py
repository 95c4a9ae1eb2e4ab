"""The layer: router, dispatch, experts, combine, with parameters and losses."""
