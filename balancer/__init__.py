"""Where the experts are: policies, planner and the placement service (`balancer.main.run`)."""
