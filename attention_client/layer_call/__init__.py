"""One MoE layer call in the attention client: dispatch, send, wait, hedge, fail over, combine."""
