"""What the GPUs of a host can do at most, and what their launches wait for."""
