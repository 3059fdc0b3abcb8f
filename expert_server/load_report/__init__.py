"""An expert server's report to the balancer: load of its experts and links."""
