"""Long runs of random calls whose results are all checked."""
