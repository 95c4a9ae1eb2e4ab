"""The native modules and the custom calls they serve."""
