"""Perplexity of a model by the format of its weights, served by a cluster and computed by transformers.

Each format makes a copy of the checkpoint. A cluster serves the copy, in bfloat16. transformers, alone and in
float32, computes the same weights dequantised: the format's own part of the loss, without rounding of
activations or sums.

The document of `python -m benchmarks.quality --json`:

    formats    in order; "bf16" is the first, and the others' ratios are to it
      served, dequantised    perplexity by the cluster, and by transformers with the dequantised weights
        perplexity           exp of the mean loss of a token
        ratio, error         to the same column of bf16, and its standard error over the windows
        losses               mean loss (nats a token) of each text
      ratio, error           of the cluster to transformers
      kernel                 of the expert server
    left_out   format -> why it cannot hold this model

All formats read the same windows of the texts. Formats of checkpoints round attention and experts to the
nearest value, without calibration; MXFP4, int8 and int4 (`expert_server.quantization`) experts only.
"""
