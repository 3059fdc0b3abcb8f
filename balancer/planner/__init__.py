"""The balancer's planner: a pure state machine from cluster views to placement actions."""
