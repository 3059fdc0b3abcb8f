"""Speed at which a live expert server reads its experts for few tokens, against the machine's read speed.

`eaas bench experts` calls a kernel in its own process. Here an expert server in a process of its own answers
requests from shared memory, layer after layer, as a model's forward passes send them: with its pages, its
threads, and their wake-ups. Between two requests the client computes for a while, as attention does.

    live          bytes of the experts that a request reads, over the time in its answer (`service_us`)
    round trip    the same bytes, over the time from the client's first store to its last load
    read          memory read by as many threads of the same server, before and after each round; the best of
                  several ways

The document of `python -m benchmarks.experts --json`: a row holds medians over the rounds, and `least` and
`most` of `live`. `live` and `round_trip` are fractions of `read`. There are so many layers that no cache
holds an expert until its next use.
"""
