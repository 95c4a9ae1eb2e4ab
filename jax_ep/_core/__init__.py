"""The base of all other packages: configs, handles, result types, checks, errors."""
