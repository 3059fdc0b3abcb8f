"""Connections to expert servers: slots, messages, deadlines, transports."""
