"""What all other packages know: configs, handles, results' types, checks."""
