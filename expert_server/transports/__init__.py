"""The server's ends of the transports, and slot ownership."""
