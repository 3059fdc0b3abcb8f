"""The expert server's serving loop: poll, batch, compute, reply."""
