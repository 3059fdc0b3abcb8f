"""The life of one layer call: dispatch, send, wait, hedge, fail over, combine."""
