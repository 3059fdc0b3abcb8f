"""What an engine and its users share: requests, settings, answers and errors. Needs no torch."""
