"""Simulates the live autoscaler on traffic traces, for `eaas simulate autoscale`; no cluster runs."""
