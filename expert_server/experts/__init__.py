"""The experts that an expert server holds: the balancer's calls load and unload them."""
