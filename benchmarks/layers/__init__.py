"""Times of whole expert layers, and of their grouped matmuls."""
