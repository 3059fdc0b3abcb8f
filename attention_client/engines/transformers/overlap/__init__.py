"""Double-batch overlap: one micro-batch computes attention while the other waits for its experts."""
