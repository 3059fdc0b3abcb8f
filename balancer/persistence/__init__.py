"""The balancer's state that survives its restart or a change of the monitors' leader."""
