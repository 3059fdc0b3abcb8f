"""An expert server's report to the balancer: the load of its experts and network links."""
