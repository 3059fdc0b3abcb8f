"""How requests reach the expert server's slots: server ends of the transports, slot ownership."""
