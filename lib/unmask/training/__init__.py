"""Training: one loop for all stages, gradient caching, exact resume, child processes."""
