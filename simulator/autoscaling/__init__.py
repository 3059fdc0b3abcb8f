"""The live autoscaler on traffic traces."""
