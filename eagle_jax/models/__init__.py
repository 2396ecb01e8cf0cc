"""What networks compute. Knows nothing of trees, sampling or files."""
