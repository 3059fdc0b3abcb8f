"""Batch selection (CAPS): what a step costs on an expert server, and a recorded queue run again."""
