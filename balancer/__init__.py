"""The balancer process: decides which server holds which experts (entry point: `balancer.main.run`)."""
