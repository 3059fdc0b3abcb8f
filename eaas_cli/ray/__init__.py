"""A cluster on Ray, for `eaas up --on ray`: Ray places the processes and starts them again.

Each role is a detached, named Ray actor that keeps one `eaas` process running on its node:

    eaas up --on ray          Ray
      |  creates              |
      +-> monitor             restarts an actor whose worker or node is lost,
      +-> balancer            on another node if its own is gone
      +-> expert-server-0 ..  |
      +-> attention-client-0  |
      +-> frontend            |
      +-> controller          follows `eaas scale`, and moves the monitor when its node is lost

`eaas up` returns when the cluster serves; `eaas down` ends the cluster.
"""
