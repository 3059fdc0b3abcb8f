"""An attention client's connections to expert servers: slots, messages, deadlines, transports."""
